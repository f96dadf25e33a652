"""Baseline of `gateway.py`: a proxy that only passes requests on, made of the same server and client libraries as the
gateway.

    python benchmarks/pass_through.py UPSTREAM
"""

import argparse
import asyncio
import json
import socket

import aiohttp
from aiohttp import web


async def serve(upstream: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    session = aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=aiohttp.ClientTimeout(total=None)
    )

    async def passed_on(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "application/json"}
        async with session.post(upstream + request.path, data=await request.read(), headers=headers) as answer:
            if "event-stream" not in answer.headers.get("Content-Type", ""):
                return web.Response(status=answer.status, body=await answer.read(), headers=headers)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=10 << 20)
    app.router.add_post("/{path:.*}", passed_on)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, sock).start()
    print(json.dumps({"url": f"http://127.0.0.1:{sock.getsockname()[1]}"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("upstream", help="Base address of the server that requests are passed on to.")
    asyncio.run(serve(parser.parse_args().upstream))
