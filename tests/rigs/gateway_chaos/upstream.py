"""The model server of a chaos run, in a process of its own. It responds according to the plan.

    PYTHONPATH=tests python -m rigs.gateway_chaos.upstream --seed 0 --log FILE

It writes a line to the log for each call when it arrives, so that calls without a stored transition can be detected.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path

from aiohttp import web

from assay.traces.messages import gemini
from assay.traces.messages.dialects import DIALECTS
from rigs.gateway_chaos.plan import Call, Script, script_of, spec_of


def app_of(seed: int, log: Path) -> web.Application:
    """The server as an aiohttp application."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # unbuffered: the process will be killed

    async def respond(request: web.Request) -> web.StreamResponse:
        call = Call.of((await request.json())["metadata"]["chaos"])
        os.write(file, f"{call}\n".encode())
        return await _send(request, script_of(seed, call), stream=spec_of(seed, call.conversation).stream)

    app = web.Application(client_max_size=64 << 20)
    for dialect, path in DIALECTS.items():
        app.router.add_post(gemini.ROUTE if dialect == "gemini" else path, respond)
    return app


async def _send(request: web.Request, script: Script, *, stream: bool) -> web.StreamResponse:
    if script.status != 200:
        headers = {"Retry-After": "1"} if script.status == 429 else {}
        return web.Response(status=script.status, body=script.data, content_type="application/json", headers=headers)
    if script.kind == "reset" or (script.ending == "hang" and not script.pieces):
        if script.ending == "hang":
            await asyncio.sleep(3600)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream" if stream else "application/json"})
    if not stream:
        response.content_length = len(script.data)
    await response.prepare(request)
    sent = script.pieces if script.ending == "whole" else script.pieces[: max(1, len(script.pieces) // 2)]
    for index, piece in enumerate(sent):
        if script.pause_s and index in (0, len(sent) // 2, len(sent) - 1):
            await asyncio.sleep(script.pause_s)
        await response.write(piece)
    if script.ending == "hang":
        await asyncio.sleep(3600)
    if script.ending == "cut":
        await asyncio.sleep(0.01)  # `abort` drops bytes that are still in the buffer
        assert request.transport is not None
        request.transport.abort()
        return response
    await response.write_eof()
    return response


async def _serve(seed: int, log: Path, port: int) -> None:
    runner = web.AppRunner(app_of(seed, log), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.seed, arguments.log, arguments.port))


if __name__ == "__main__":
    main()
