"""A FastAPI handler that calls a peer: the peer has the model, the app has the users.

Start ``python -m examples.batched_calls``, and this with the ticket that it prints. Requests that
come at a time share a run of the peer's model; none holds up the app's loop.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

import mesh
from examples import batched_calls, digits

CALL_SECONDS = 5.0


def make_app(ticket: str, port: int) -> FastAPI:
    data = digits.load()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, mesh.Peer]]:
        async with mesh.Node.worker() as node:
            peer = await node.connect(ticket)
            print(f"Calling {peer.label}. Try: curl http://127.0.0.1:{port}/digit/7", flush=True)
            yield {"peer": peer}

    web = FastAPI(lifespan=lifespan)

    @web.get("/digit/{number}")
    async def digit(request: Request, number: int) -> dict[str, Any]:
        if not 0 <= number < len(data.test_labels):
            raise HTTPException(404, f"there are images 0 to {len(data.test_labels) - 1}")
        peer: mesh.Peer = request.state.peer
        image = data.test_images[number]
        seen = await peer.call(batched_calls.name_digit, image, timeout=CALL_SECONDS)
        return {"image": number, "shows": int(data.test_labels[number]), "seen": seen}

    @web.exception_handler(mesh.MeshError)
    async def explain(_: Request, error: mesh.MeshError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=502)

    return web


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ticket", help="what examples.batched_calls printed: mesh1...")
    parser.add_argument("--http", type=int, default=8000, help="TCP port on 127.0.0.1")
    options = parser.parse_args()
    uvicorn.run(make_app(options.ticket, options.http), port=options.http)
