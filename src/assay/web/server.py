"""The HTTP server of the local page: routes, access, headers, and parts that the browser loads again.

Queries run in threads of their own. What a page shows is in `assay.web.runs`, `rollouts`, `datasets`, `selection`,
`judges`, `labelling`, `data` and `deployments`.

Access is by a token that is used once, a cookie or a key, with checks of host names, and a CSRF token on every change.
The printed address has the token. The first request with it gets a cookie and the token is void. Without a token, a key
opens the page: in a form, or as a bearer token for scripts. Keys and host names are checked as the gateway does.
"""

import asyncio
import gzip
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from aiohttp import web
from markupsafe import Markup

from assay.errors import AssayError, ConfigError, StoreError, UnknownRollout
from assay.reports.texts import pretty, readable
from assay.support.scrubbing import add_secrets, message
from assay.traces.gateway.access import LOOPBACK, Access, Refused
from assay.traces.store import Store
from assay.traces.store.listing import find_run, finished_report
from assay.web import rollouts, rollouts as datasets, runs
from assay.web.rendering import STATIC, View, compile_templates, link, render, static_file

CSRF_FIELD, CSRF_HEADER = "csrf", "X-CSRF-Token"


class PageAccess:
    """Access control of the page: a token that opens it once, a key, and the host names that it answers to.

    Args:
        key: opens the page wherever it is sent; None allows only the token.
        host: the address to listen on.
        names: further host names that requests may use.
    Raises:
        ConfigError: a non-loopback host without a key, or a malformed key.
    """

    def __init__(self, key: str | None, *, host: str, names: Iterable[str] = ()) -> None:
        if host not in LOOPBACK and not key:
            raise ConfigError(
                f"`host={host!r}` is reachable from other machines: set a `key` that opens the page (ASSAY_KEY)"
            )
        self._gate = Access(key, host=host, names=names)
        self.has_key = key is not None
        self.token = secrets.token_urlsafe(24)
        self._token_is_used = False
        self._session = secrets.token_urlsafe(32)
        # Cookies do not differ by port: two pages on one host would overwrite each other's.
        self.cookie = f"assay_page_{secrets.token_hex(4)}"

    @property
    def csrf(self) -> str:
        """The token that forms of this server carry."""
        return hmac.new(self._session.encode(), b"csrf", sha256).hexdigest()

    def check_host(self, request: web.Request) -> None:
        """Raises `Refused` if the Host header is not a name of this server (DNS rebinding)."""
        header = request.headers.get("Host", "")
        try:
            self._gate.check_host(header)
        except Refused:
            raise Refused(
                403,
                f"this page is not served under the host {header[:100]!r}; assay view --allow-host NAME adds one",
            ) from None

    def redeem(self, token: str) -> bool:
        """Whether `token` is that of the printed address. It is accepted once."""
        if self._token_is_used or not _equal(token, self.token):
            return False
        self._token_is_used = True
        return True

    def key_opens(self, key: str) -> bool:
        """Whether the text is the key of this server."""
        return self.has_key and _equal(key, self._gate.key)

    def check_session(self, request: web.Request) -> None:
        """Raises `Refused` if the request has neither the cookie nor the key."""
        if not (_equal(request.cookies.get(self.cookie, ""), self._session) or self._sends_key(request)):
            raise Refused(401, "open the address that assay view printed; it can be opened once")

    def check_change(self, request: web.Request, sent: str) -> None:
        """Raises `Refused` unless a request that changes something comes from a page of this server.

        Args:
            sent: the CSRF token in its form or header.
        """
        self.check_origin(request)
        if not (self._sends_key(request) or _equal(sent, self.csrf)):
            raise Refused(403, "the form is out of date: reload the page and try again")

    def check_origin(self, request: web.Request) -> None:
        """Raises `Refused` if a browser says that the request comes from another site."""
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower():
            raise Refused(403, f"a page of {origin[:100]!r} may not change anything here")

    def admit(self, response: web.StreamResponse) -> None:
        """Sets the cookie of the session."""
        response.set_cookie(self.cookie, self._session, httponly=True, samesite="Strict", path="/")

    def _sends_key(self, request: web.Request) -> bool:
        return self.has_key and self._gate.caller(request).has_key


def _equal(sent: str, expected: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), expected.encode())


_LOG = logging.getLogger("assay.web")
_THREADS = 4
_MOST_BODY = 64 << 10  # bytes of a form
_PART = 256 << 10  # bytes of a download that are read at once
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_PUBLIC = ("/static/", "/login")  # prefixes of paths that need no session
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LocalPage:
    """The page over a store.

    Args:
        where: the store's location, next to which the folders of runs are.
        store_flag: value of `--store` in the commands that the page shows; None leaves it out.
    """

    def __init__(
        self, store: Store, access: PageAccess, *, where: str | Path | None = None, store_flag: str | None = None
    ) -> None:
        self._store, self.access = store, access
        self._where, self._store_flag = where, store_flag
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="assay-page")
        add_secrets(access.token)

    def app(self) -> web.Application:
        """An aiohttp application; any runner serves it."""
        app = web.Application(client_max_size=_MOST_BODY, middlewares=[self._guard])
        app.router.add_get("/", self._home)
        app.router.add_get("/runs", self._runs)
        app.router.add_get("/runs/{run}", self._run)
        app.router.add_get("/runs/{run}/report", self._report)
        app.router.add_get("/rollouts", self._rollouts)
        app.router.add_post("/rollouts/export", self._download)
        app.router.add_get("/rollouts/{rollout}", self._rollout)
        app.router.add_get("/rollouts/{rollout}/json", self._rollout_json)
        app.router.add_get("/rollouts/{rollout}/calls/{t}", self._call_json)
        app.router.add_post("/rollouts/{rollout}/rating", self._rate)
        app.router.add_post("/rollouts/{rollout}/dataset", self._add)
        app.router.add_get("/compare", self._compare)
        app.router.add_get("/judges", self._judges)
        app.router.add_get("/judges/{judge}", self._judge)
        app.router.add_get("/judges/{judge}/label", self._label)
        app.router.add_post("/judges/{judge}/labels", self._store_label)
        app.router.add_post("/judges/{judge}/labels/withdraw", self._withdraw_label)
        app.router.add_get("/data", self._data)
        app.router.add_get("/deployments", self._deployments)
        app.router.add_get("/deployments/{deployment}", self._deployment)
        app.router.add_get("/deployments/{deployment}/order/{action}", self._confirm)
        app.router.add_post("/deployments/{deployment}/order", self._order)
        app.router.add_post("/login", self._login)
        app.router.add_get("/static/{name}", self._static)
        app.on_cleanup.append(self._end)
        return app

    def warm_up(self) -> None:
        """Starts a thread that loads what the first pages would load: numpy, the templates, and commands."""
        self._threads.submit(_load)

    async def _end(self, app: web.Application) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- access and errors

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks access, turns exceptions into pages, and sets the headers of every answer."""
        try:
            response: web.StreamResponse = await self._admitted(request, handler)
        except Refused as error:
            response = self._message(error.status, str(error))
        except UnknownRollout as error:
            response = self._message(404, str(error))
        except ConfigError as error:
            response = self._message(400, str(error))
        except StoreError as error:
            response = self._message(404 if request.method in ("GET", "HEAD") else 503, str(error))
        except sa.exc.DBAPIError as error:
            _LOG.error("%s %s: %s", request.method, request.path, message(str(error.orig)))
            response = self._message(503, f"the database did not answer: {message(str(error.orig))}")
        except AssayError as error:
            response = self._message(500, str(error))
        except web.HTTPException as error:
            response = self._message(error.status, error.reason)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            _LOG.exception("%s %s", request.method, request.path)
            response = self._message(500, f"the server failed with {type(error).__name__}; its terminal shows where")
        response.headers.update(_HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    async def _admitted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The answer to a request that may be made. Raises `Refused` for any other."""
        self.access.check_host(request)
        if (opened := self._opened(request)) is not None:
            return opened
        if not request.path.startswith(_PUBLIC):
            self.access.check_session(request)
        return await handler(request)

    def _opened(self, request: web.Request) -> web.Response | None:
        """The redirect that exchanges the token of the printed address for the cookie; None without a valid token."""
        token = request.query.get("token")
        if token is None or request.method != "GET" or not self.access.redeem(token):
            return None
        rest = {name: value for name, value in request.query.items() if name != "token"}
        # The path is taken apart and quoted again: `//host` must not become an address of another server.
        response = web.Response(status=303, headers={"Location": link(*request.path.strip("/").split("/"), **rest)})
        self.access.admit(response)
        return response

    def _message(self, status: int, text: str) -> web.Response:
        has_form = status == 401 and self.access.has_key
        title = {401: "Not open yet", 403: "Refused", 404: "Not found"}.get(status, "Not possible")
        body = render("message.html", title=title, text=readable(text), has_form=has_form, csrf="", live_s=0)
        return web.Response(text=body, status=status, content_type="text/html", charset="utf-8")

    async def _login(self, request: web.Request) -> web.Response:
        self.access.check_origin(request)
        form = await request.post()
        if not self.access.key_opens(str(form.get("key", ""))):
            raise Refused(401, "this is not the key of this page")
        response = web.Response(status=303, headers={"Location": "/"})
        self.access.admit(response)
        return response

    async def _changing_form(self, request: web.Request) -> Mapping[str, Any]:
        """The form of a request that changes something. Raises `Refused` if no page of this server sent it."""
        form = await request.post()
        self.access.check_change(request, request.headers.get(CSRF_HEADER) or str(form.get(CSRF_FIELD, "")))
        return form

    # -- answers

    async def _query(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The result of a function that reads or writes the store."""
        call = partial(function, self._store, *arguments, **keywords)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _answer(self, request: web.Request, view: View) -> web.Response:
        """A page; for a request that loads a part again only that, or nothing if it has not changed."""
        values = {**view.values, "title": view.title, "csrf": self.access.csrf}
        if not view.part:
            return self._html(render(view.template, **values, live_s=0), view.status)
        part = render(view.part, **values)
        digest = sha256(part.encode()).hexdigest()[:16]
        query = {name: value for name, value in request.query.items() if name != "seen"}
        address = link(*request.path.strip("/").split("/"), **query, seen=digest)
        live = {"part": Markup(part), "live_s": view.every_s, "live_address": address}
        if request.headers.get("HX-Request") == "true":
            if request.query.get("seen") == digest and view.every_s:
                return web.Response(status=204)
            return self._html(render("live.html", **live), view.status)
        return self._html(render(view.template, **values, **live), view.status)

    def _html(self, text: str, status: int = 200) -> web.Response:
        return web.Response(
            text=text, status=status, content_type="text/html", charset="utf-8", headers={"Vary": "HX-Request"}
        )

    def _plain(self, request: web.Request, text: str) -> web.Response:
        """JSON as a text of its own, which no browser interprets; for a part of a page as an element."""
        if request.headers.get("HX-Request") == "true":
            return self._html(render("json_part.html", text=text[:100_000], left_out=max(0, len(text) - 100_000)))
        body = text.encode("utf-8", "replace")
        return web.Response(body=body, content_type="text/plain", charset="utf-8")

    # -- pages

    async def _home(self, request: web.Request) -> web.Response:
        return web.Response(status=303, headers={"Location": "/runs"})

    async def _runs(self, request: web.Request) -> web.Response:
        return self._answer(request, await self._query(runs.runs_page, request.query))

    async def _run(self, request: web.Request) -> web.Response:
        view = await self._query(
            runs.run_page, request.match_info["run"], request.query, where=self._where, store_flag=self._store_flag
        )
        return self._answer(request, view)

    async def _report(self, request: web.Request) -> web.Response:
        return self._plain(request, await self._query(self._report_of, request.match_info["run"]))

    def _report_of(self, store: Store, run_id: str) -> str:
        report = finished_report(store, find_run(store, run_id)["id"])
        if report is None:
            raise StoreError(f"the run {run_id[:80]!r} has no report")
        return pretty(report)

    async def _rollouts(self, request: web.Request) -> web.Response:
        return self._answer(request, await self._query(rollouts.rollouts_view, request.query))

    async def _rollout(self, request: web.Request) -> web.Response:
        view = await self._query(
            rollouts.rollout_view, request.match_info["rollout"], request.query,
            where=self._where, store_flag=self._store_flag,
        )  # fmt: skip
        return self._answer(request, view)

    async def _rollout_json(self, request: web.Request) -> web.Response:
        return self._plain(request, await self._query(rollouts.rollout_json, request.match_info["rollout"]))

    async def _call_json(self, request: web.Request) -> web.Response:
        number = request.match_info["t"]
        if not (number.isascii() and number.isdigit() and len(number) < 9):
            raise UnknownRollout(f"there is no call {number[:80]!r}")
        text = await self._query(rollouts.call_json, request.match_info["rollout"], int(number))
        return self._plain(request, text)

    async def _compare(self, request: web.Request) -> web.Response:
        return self._answer(request, await self._query(runs.compare_view, request.query))

    async def _judges(self, request: web.Request) -> web.Response:
        from assay.web.judges import judges_view  # numpy is loaded with the first of these pages

        return self._answer(request, await self._query(judges_view))

    async def _judge(self, request: web.Request) -> web.Response:
        from assay.web.judges import judge_view

        key = request.match_info["judge"]
        view = await self._query(judge_view, key, store_flag=self._store_flag)
        return self._answer(request, view)

    async def _label(self, request: web.Request) -> web.Response:
        from assay.web.labelling import label_view

        return self._answer(request, await self._query(label_view, request.match_info["judge"], request.query))

    async def _store_label(self, request: web.Request) -> web.Response:
        from assay.web.labelling import store_label

        form = await self._changing_form(request)
        following = await self._query(store_label, request.match_info["judge"], form)
        return web.Response(status=303, headers={"Location": following})

    async def _withdraw_label(self, request: web.Request) -> web.Response:
        from assay.web.labelling import withdraw_label

        form = await self._changing_form(request)
        following = await self._query(withdraw_label, request.match_info["judge"], form)
        return web.Response(status=303, headers={"Location": following})

    async def _data(self, request: web.Request) -> web.Response:
        from assay.web.data import data_view

        return self._answer(request, await self._query(data_view, request.query, store_flag=self._store_flag))

    async def _deployments(self, request: web.Request) -> web.Response:
        from assay.web.deployments import deployments_view  # numpy is loaded with the first of these pages

        return self._answer(request, await self._query(deployments_view))

    async def _deployment(self, request: web.Request) -> web.Response:
        from assay.web.deployments import deployment_view

        name, query = request.match_info["deployment"], request.query
        view = await self._query(deployment_view, name, query, store_flag=self._store_flag)
        return self._answer(request, view)

    async def _confirm(self, request: web.Request) -> web.Response:
        from assay.web.deployments import confirm_view

        name, action = request.match_info["deployment"], request.match_info["action"]
        return self._answer(request, await self._query(confirm_view, name, action))

    async def _order(self, request: web.Request) -> web.Response:
        from assay.web.deployments import give_order

        form = await self._changing_form(request)
        ordered = await self._query(give_order, request.match_info["deployment"], form)
        return web.Response(status=303, headers={"Location": link("deployments", ordered.id)})

    async def _rate(self, request: web.Request) -> web.Response:
        form = await self._changing_form(request)
        rated = await self._query(rollouts.rate, request.match_info["rollout"], str(form.get("rating", "")))
        if request.headers.get("HX-Request") == "true":
            values = rollouts.rating_values(rated)
            return self._html(render("rating.html", rollout=rated, csrf=self.access.csrf, filters={}, **values))
        filters = {name: value for name, value in request.query.items() if name != "token"}
        return web.Response(status=303, headers={"Location": link("rollouts", rated.id, **filters)})

    async def _add(self, request: web.Request) -> web.Response:
        form = await self._changing_form(request)
        rollout = await self._query(rollouts.one_rollout, request.match_info["rollout"])
        added = await self._query(datasets.add_to_dataset, rollout, form, where=self._where)
        if request.headers.get("HX-Request") == "true":
            values = await self._query(datasets.dataset_values, rollout, self._where, added)
            return self._html(render("dataset.html", rollout=rollout, csrf=self.access.csrf, filters={}, **values))
        filters = {name: value for name, value in request.query.items() if name != "token"}
        return web.Response(status=303, headers={"Location": link("rollouts", rollout.id, **filters)})

    async def _download(self, request: web.Request) -> web.StreamResponse:
        from assay.web.data import download  # the packages of exports are loaded with the first download

        form = await self._changing_form(request)
        export = await self._query(download, request.query, form)
        with export.file:
            response = web.StreamResponse(headers={**_HEADERS, "Cache-Control": "no-store"})
            response.content_type = "application/x-ndjson"
            response.headers["Content-Disposition"] = f'attachment; filename="{export.name}"'
            await response.prepare(request)
            loop = asyncio.get_running_loop()
            while part := await loop.run_in_executor(self._threads, export.file.read, _PART):
                await response.write(part)
        await response.write_eof()
        return response

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in STATIC:
            raise web.HTTPNotFound
        body, _ = static_file(name)
        charset = "utf-8" if STATIC[name].startswith("text/") else None
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 6, mtime=0), "gzip"
        return web.Response(body=body, content_type=STATIC[name], charset=charset, headers=headers)


def reachable(host: str) -> str:
    """The name under which a browser on this machine reaches a server that listens on `host`."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _load() -> None:
    from scipy import special  # noqa: F401

    from assay.commands.repeat import run_command
    from assay.web import data, deployments, judges  # noqa: F401

    compile_templates()
    for kind in ("compile", "evaluate", "judge audit"):  # modules of commands that pages of runs offer
        run_command(kind, {})
