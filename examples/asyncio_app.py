"""The app in a plain asyncio program."""

import argparse
import asyncio
import signal

import h11

from examples.app import App, open_app
from examples.options import parse_options
from examples.tiny_http import MAX_READ, REQUEST_SECONDS, Exchange, respond


async def main(options: argparse.Namespace) -> None:
    async with open_app(options) as app, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(app, options.http))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)


async def serve(app: App, port: int) -> None:
    async with asyncio.TaskGroup() as clients:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            clients.create_task(answer(app, reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", port)
        try:
            print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
            await asyncio.Event().wait()
        finally:
            server.close()


async def answer(app: App, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    exchange, path = Exchange(), None
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            while path is None:
                path = exchange.receive(await reader.read(MAX_READ))
            writer.write(exchange.answer(*await respond(app, path)))
            await writer.drain()
    except (h11.RemoteProtocolError, ConnectionError, TimeoutError):
        pass  # who speaks no HTTP, hangs up or dawdles gets no answer
    finally:
        writer.close()


if __name__ == "__main__":
    asyncio.run(main(parse_options()))
