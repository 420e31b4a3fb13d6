"""The pages over HTTP, on loopback by default. They only read, and a page never runs what an episode says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import jinja2
import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hintloop.cli.errors import UserError
from hintloop.cli.runfolder import RunFolder, write_text
from hintloop.cli.view import text
from hintloop.cli.view.conversation import conversation
from hintloop.cli.view.data import RunData
from hintloop.cli.view.episodes import EpisodeList, Examples, NotThere
from hintloop.cli.view.overview import overview
from hintloop.replay.episode import Outcome
from hintloop.replay.journal import Journal

NEWEST = 12
"""Episodes on the page of the run."""
_HERE = Path(__file__).parent
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_MARKS_OF_A_RUN = ("config.toml", "journal", "metrics", "status")
_HEADERS = {
    b"content-security-policy": b"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    b"img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class _Gate:
    """Refuses browsers on pages of other hosts, and puts the headers on every answer.

    A page of another host that had its name point here would send that name as ``Host``; so where only this
    machine is meant to look, the name is checked too.
    """

    def __init__(self, app: ASGIApp, host: str, names: Sequence[str]) -> None:
        self._app = app
        self._hosts = {*_LOOPBACK, host, *names}
        self._any_name = host not in _LOOPBACK and not names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_HEADERS.items()]
            await send(message)

        if self._refuses(dict(scope["headers"])):
            await PlainTextResponse("pages of other hosts are refused\n", 403)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)

    def _refuses(self, headers: Mapping[bytes, bytes]) -> bool:
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        own = _hostname(f"//{host}")
        foreign_name = not self._any_name and own not in self._hosts
        allowed = {*self._hosts, own} if self._any_name else self._hosts
        return foreign_name or (bool(origin) and _hostname(origin) not in allowed)


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class Pages:
    """Makes the pages of one run, or of a journal alone. Requests take turns: only one reads at a time."""

    def __init__(self, folder: RunFolder | None, journal: Journal, title: str) -> None:
        self._data = RunData(folder) if folder else None
        self._episodes = EpisodeList(journal)
        self._examples = Examples(folder.path / "examples") if folder else None
        self._templates = _templates(title, has_run=folder is not None)
        self._lock = threading.Lock()

    def routes(self) -> list[Route]:
        """Where each page is."""
        pages: dict[str, Callable[[Request], str]] = {
            "/": self._run if self._data else self._list,
            "/episodes": self._list,
            "/episode/{segment}/{number:int}": self._episode,
            "/example/{file}": self._example,
        }
        return [Route(path, partial(self._answer, page)) for path, page in pages.items()]

    def _answer(self, page: Callable[[Request], str], request: Request) -> Response:
        try:
            with self._lock:
                body = page(request)
        except NotThere as error:
            raise HTTPException(404, text.name(str(error))) from error
        return Response(body.encode("utf-8", "replace"), media_type="text/html")

    def _run(self, request: Request) -> str:
        assert self._data is not None
        self._data.refresh()
        try:
            newest = self._episodes.page(size=NEWEST)
        except NotThere:
            newest = None
        examples = self._examples.names() if self._examples else []
        shown = overview(self._data, newest.segments if newest else None)
        return self._render("run.html", **shown, newest=newest, examples=examples)

    def _list(self, request: Request) -> str:
        query = request.query_params
        find, outcome = query.get("find", "")[:200], query.get("outcome", "")[:40]
        page = self._episodes.page(before=query.get("before"), find=find, outcome=outcome)
        return self._render("episodes.html", page=page, find=find, outcome=outcome, outcomes=list(Outcome))

    def _episode(self, request: Request) -> str:
        number = request.path_params["number"]
        episode, group = self._episodes.open(request.path_params["segment"], number)
        shown = conversation(episode, group, here=number, start=_start(request))
        return self._render("episode.html", **shown)

    def _example(self, request: Request) -> str:
        if self._examples is None:
            raise NotThere("a journal alone has no examples")
        episode = self._examples.open(request.path_params["file"])
        return self._render("episode.html", **conversation(episode, (), here=-1, start=_start(request)))

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)


def create_app(pages: Pages, host: str = "127.0.0.1", names: Sequence[str] = ()) -> ASGIApp:
    """The web application; ``host`` and ``names`` are what browsers may call it by, beside loopback's names.

    Without ``names``, a ``host`` that is not of loopback may be called by any name.
    """

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def fail(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return PlainTextResponse(
            f"{text.visible(error.detail)}\n".encode("utf-8", "replace"), error.status_code
        )

    static = Mount("/static", StaticFiles(directory=_HERE / "static"))
    routes = [*pages.routes(), Route("/health", health), static]
    return _Gate(Starlette(routes=routes, exception_handlers={HTTPException: fail}), host, names)


def open_pages(run: Path | None, journal: str | None) -> Pages:
    """The pages for a run folder, a journal, or a run folder whose journal is elsewhere. ``UserError``."""
    if run is None:
        if journal is None:
            raise UserError("give a RUN to look at, or a --journal")
        return Pages(None, Journal(journal), journal)
    if not any((run / name).exists() for name in _MARKS_OF_A_RUN):
        raise UserError(f"{run} is not the folder of a run: it has none of {', '.join(_MARKS_OF_A_RUN)}")
    folder = RunFolder(run)
    return Pages(folder, Journal(journal or folder.journal), run.absolute().name)


def serve(
    pages: Pages,
    *,
    host: str,
    port: int,
    names: Sequence[str] = (),
    ready_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; ``say`` gets the address. ``port`` 0 takes a free one. ``OSError``.

    ``names``: see ``create_app``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{sock.getsockname()[1]}"
    config = uvicorn.Config(
        create_app(pages, host, names),
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    if ready_file is not None:
        ready_file.unlink(missing_ok=True)
    try:
        _Server(config, partial(_announce, url, ready_file, say)).run(sockets=[sock])
    finally:
        sock.close()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Says when it is ready, and returns on a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()


def _announce(url: str, ready_file: Path | None, say: Callable[[str], None]) -> None:
    say(url)
    if ready_file is not None:
        write_text(ready_file, url + "\n")


def _templates(title: str, *, has_run: bool) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.globals.update(title_of_run=text.name(title), has_run=has_run)
    made.filters.update(number=text.number, percent=text.percent, moment=text.moment)
    return made


def _shown(value: Any) -> Any:
    """Each value on its way into a page, before it is escaped."""
    return text.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _start(request: Request) -> int:
    """The first turn to show."""
    given = request.query_params.get("turn", "0")
    if not given.isdecimal() or len(given) > 9:
        raise NotThere("turn is a number from 0 on")
    return int(given)
