"""A FastAPI app on the mesh: its node lives in its loop, from the app's start to its stop."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import mesh
from examples.app import App, open_app
from examples.options import parse_options


def make_app(options: argparse.Namespace) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, App]]:
        async with open_app(options) as app:
            yield {"app": app}

    web = FastAPI(lifespan=lifespan)

    @web.get("/peers")
    async def peers(request: Request) -> list[dict[str, Any]]:
        return [peer.as_message() for peer in request.state.app.node.peers()]

    @web.get("/greet/{name}")
    async def greet(request: Request, name: str) -> Any:
        return await request.state.app.greet_peer(name)

    @web.get("/notes")
    async def notes(request: Request) -> list[str]:
        return list(request.state.app.notes)

    @web.exception_handler(mesh.MeshError)
    async def explain(_: Request, error: mesh.MeshError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=502)

    return web


if __name__ == "__main__":
    options = parse_options()
    uvicorn.run(make_app(options), port=options.http, timeout_graceful_shutdown=5)
