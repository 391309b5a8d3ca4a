"""The app in a plain trio program."""

import argparse
import signal
from functools import partial

import h11
import trio

from examples.app import App, open_app
from examples.options import parse_options
from examples.tiny_http import MAX_READ, REQUEST_SECONDS, Exchange, respond


async def main(options: argparse.Namespace) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_app(options) as app, trio.open_nursery() as nursery:
            serve = partial(trio.serve_tcp, partial(answer, app), options.http, host="127.0.0.1")
            (listener,) = await nursery.start(serve)
            print(f"http://127.0.0.1:{listener.socket.getsockname()[1]}", flush=True)
            async for _ in signals:
                nursery.cancel_scope.cancel()


async def answer(app: App, client: trio.SocketStream) -> None:
    exchange, path = Exchange(), None
    with trio.move_on_after(REQUEST_SECONDS):
        try:
            while path is None:
                path = exchange.receive(bytes(await client.receive_some(MAX_READ)))
            await client.send_all(exchange.answer(*await respond(app, path)))
        except (h11.RemoteProtocolError, trio.BrokenResourceError):
            pass  # who speaks no HTTP, or hangs up, gets no answer


if __name__ == "__main__":
    trio.run(main, parse_options())
