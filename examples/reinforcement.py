"""Reinforcement learning with observers on peers, as PyTorch's own tutorial of RPC has it.

Worker 0 is the agent: it has the policy, and a reference to an `Observer` at each other worker. An
observer plays a game there, and asks the agent for each move through a reference to it::

    mesh run --nproc-per-node 3 -m examples.reinforcement
    torchrun --standalone --nproc-per-node 3 -m examples.reinforcement

The game is Catch: a ball falls through `ROWS` rows of `COLUMNS` columns, and a paddle at the bottom
goes left, stays or goes right in each.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading

import torch
from torch import nn
from torch.distributions import Categorical

from mesh import rpc

COLUMNS, ROWS, MOVES = 5, 6, 3
EPISODES = 2
"""Games that each observer plays before the agent learns from them."""

LAST_EPISODES = 10
"""And in the end, to see what it has learnt."""

LEARNING_RATE = 0.05


class Catch:
    """The game. A state is where the ball and the paddle are, from 0 to 1."""

    def __init__(self, generator: torch.Generator) -> None:
        self.ball, self.paddle = torch.randint(COLUMNS, (2,), generator=generator).tolist()
        self.row = 0

    def state(self) -> torch.Tensor:
        """Return what an observer sees."""
        return torch.tensor([self.ball, self.paddle]) / COLUMNS

    def step(self, move: int) -> float:
        """Move the paddle by `move` - 1; return the reward: 1 under the ball, or nearer."""
        before = abs(self.ball - self.paddle)
        self.paddle = min(max(self.paddle + move - 1, 0), COLUMNS - 1)
        self.row += 1
        after = abs(self.ball - self.paddle)
        return 1.0 if after < before or not after else -1.0


@rpc.exposed
class Observer:
    """Plays at its worker."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.id = rpc.get_worker_info().id

    def play(self, agent: rpc.RRef[Agent], episodes: int) -> None:
        """Play some games, asking the agent for each move, and telling it how each has ended."""
        for _ in range(episodes):
            game, rewards = Catch(self.generator), []
            while game.row < ROWS - 1:
                move = agent.rpc_sync().choose(self.id, game.state())
                rewards.append(game.step(move))
            agent.rpc_sync().end(self.id, rewards, game.paddle == game.ball)


@rpc.exposed
class Agent:
    """Has the policy. Observers call it in threads."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, MOVES))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        self.lock = threading.Lock()
        self.explores = True
        self.games: dict[int, list[torch.Tensor]] = {}
        self.moves: list[tuple[torch.Tensor, float]] = []
        self.caught: list[bool] = []

    def choose(self, observer: int, state: torch.Tensor) -> int:
        """Draw an observer's next move."""
        with self.lock:
            moves = Categorical(logits=self.policy(state))
            move = moves.sample() if self.explores else moves.logits.argmax()
            self.games.setdefault(observer, []).append(moves.log_prob(move))
            return int(move)

    def end(self, observer: int, rewards: list[float], caught: bool) -> None:
        """Hear what an observer's moves in a game have brought."""
        with self.lock:
            self.moves += zip(self.games.pop(observer), rewards, strict=True)
            self.caught.append(caught)

    def learn(self) -> float:
        """Make moves likelier that were good (REINFORCE); return the share of balls caught."""
        chances, rewards = zip(*self.moves, strict=True)
        given, share = torch.tensor(rewards), sum(self.caught) / len(self.caught)
        self.moves, self.caught = [], []
        loss = -(torch.stack(chances) * (given - given.mean())).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return share


def train(rounds: int, world_size: int) -> None:
    agent = rpc.RRef(Agent())
    observers = [rpc.remote(rank, Observer, (rank,)) for rank in range(1, world_size)]
    print(f"{len(observers)} observers play {EPISODES} games each in every round", flush=True)
    for number in range(rounds + 1):
        agent.local_value().explores = number < rounds  # in the end it does what it knows best
        games = EPISODES if number < rounds else LAST_EPISODES
        playing = [each.rpc_async().play(agent, games) for each in observers]
        torch.futures.wait_all(playing)
        caught = agent.local_value().learn()
        if number % 10 == 9:
            print(f"round {number + 1}: {100 * caught:.0f} % caught", flush=True)
    print(f"in the end: {100 * caught:.0f} % caught", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="how often the agent learns")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        print("Start it with several workers:")
        print("  mesh run --nproc-per-node 3 -m examples.reinforcement")
        return 2
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        train(options.rounds, world_size)
    rpc.shutdown()
    return 0


if __name__ == "__main__":
    # As the module that peers know it by, however each of them was started.
    from examples.reinforcement import main as run

    sys.exit(run())
