"""Access guard of the viewer's web server; viser itself accepts every connection and message."""

from __future__ import annotations

import contextlib
import http
import importlib
import io
import ipaddress
import logging
import math
import re
import socket
import typing
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, cast

from gpusim_rl.errors import ConfigError, import_extra

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY = ("0.0.0.0", "::")
MESSAGE_BYTES = 1 << 16
CLIENTS = 64  # concurrent connections; each buffers unread messages
SILENT = logging.Logger("gpusim_rl.page", logging.CRITICAL + 1)
HEADERS = {"X-Frame-Options": "SAMEORIGIN", "Cross-Origin-Resource-Policy": "same-origin"}


def guarded_server(host: str | None, port: int, needed_by: str) -> Any:
    """Start and return a viser server behind a `Guard`; without `host`, on localhost and closed to everyone."""
    guard, viser, _ = Guard(host), *(import_extra(name, "view", needed_by) for name in ("viser", "mjviser"))
    library: Any = importlib.import_module("websockets.asyncio.server")
    serve, guarded = library.serve, []

    def guarded_serve(handler: Any, *arguments: Any, process_request: Any, **options: Any) -> Any:
        guarded.append(True)
        options |= {"logger": SILENT, "max_size": MESSAGE_BYTES, "process_request": guard._request(process_request)}
        options |= {"create_connection": guard._connection(library.ServerConnection)}
        return serve(guard._handler(handler), *arguments, **options)

    library.serve = guarded_serve
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # viser prints the address
            guard.server = viser.ViserServer(host=host or "127.0.0.1", port=port, verbose=False)
    finally:
        library.serve = serve
    if not guarded:
        raise ConfigError("this version of viser is not supported", hint="Try viser 1.1")
    # Otherwise any open page could request a public tunnel.
    guard.server.request_share_url = lambda verbose=True: None
    return guard.server


class Guard:
    """Guard of a viser server at `host` (None admits nobody); drops messages until `server` is set."""

    def __init__(self, host: str | None) -> None:
        self.host, self.server = host, cast("Any", None)  # the server is set when it runs

    def problem(self, own: tuple[str, int], hosts: list[str], origins: list[str], path: str) -> str:
        """Return the reason to refuse a request, or "" to accept it.

        `Origin`, or `Host` after DNS rebinding, reveals another site's page; `own` is the server's address.
        """
        if self.host is None:
            return "this server accepts no connections"
        names = {*LOOPBACK, self.host.lower(), own[0]}
        names |= {socket.gethostname().lower()} if self.host in ANY else set()
        if len(hosts) != 1 or not _is_own(hosts[0], names, own[1]):
            name = "localhost" if self.host in LOOPBACK else own[0] if self.host in ANY else self.host
            return f"unexpected host or port; open http://{name}:{own[1]} instead"
        if origins not in ([], [f"http://{hosts[0]}"]):
            return "the request comes from another site"
        # A query could point viser's page to another server, which may run code in it.
        return "queries are not allowed" if "?" in path else ""

    def admits(self, content: bytes) -> bool:
        """Return whether a message is a camera pose or a valid value of an existing control."""
        try:
            message = importlib.import_module("msgspec.msgpack").decode(content)
            kind = message.pop("type")
            if kind == "ViewerCameraMessage":
                return _is_of(message, importlib.import_module("viser._messages").ViewerCameraMessage)
            if kind != "GuiUpdateMessage" or message.keys() != {"uuid", "updates"} or self.server is None:
                return False
            handle = self.server.gui._gui_input_handle_from_uuid.get(message["uuid"])
            updates = message["updates"]
            return handle is not None and updates.keys() == {"value"} and is_possible(handle, updates["value"])
        except Exception:  # malformed bytes fail in many ways; drop the message
            return False

    def _connection(self, base: Any) -> Any:
        admits = self.admits

        class Connection(base):
            async def recv(self, decode: bool | None = None) -> bytes:
                while True:
                    content = await super().recv(decode=False)
                    if admits(content):
                        return content

        return Connection

    def _request(self, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def request(connection: Any, received: Any) -> Any:
            host, port = connection.local_address[:2]
            hosts, origins = (received.headers.get_all(name) for name in ("Host", "Origin"))
            problem = self.problem((host.removeprefix("::ffff:"), port), hosts, origins, received.path)
            if problem:
                return connection.respond(http.HTTPStatus.FORBIDDEN, f"Access denied: {problem}.\n")
            if len(connection.server.connections) >= CLIENTS:  # open ones; handlers include handshakes
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "Too many open pages.\n")
            response = inner(connection, received)
            if response is not None:
                response.headers.update(HEADERS)
            return response

        return request

    @staticmethod
    def _handler(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        version = f"viser-v{importlib.import_module('viser').__version__}"

        async def handler(connection: Any) -> None:
            if connection.subprotocol == version:
                await inner(connection)
            else:  # viser would print the mismatch
                await connection.close(1002, f"expected {version}: reload the page")

        return handler


def is_possible(handle: Any, value: Any) -> bool:
    """Return whether a control accepts a value."""
    if hasattr(handle, "options"):
        return isinstance(value, str) and value in handle.options
    if hasattr(handle, "min"):
        whole = type(handle.value) is float or (_is_number(value) and value == int(value))
        return whole and _is_number(value) and handle.min <= value <= handle.max
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_of(message: dict[str, Any], kind: type) -> bool:
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        size, value = len(typing.get_args(hints[field.name])), message[field.name]
        numbers = value if size else [value]
        if not (isinstance(numbers, list) and len(numbers) == (size or 1) and all(map(_is_number, numbers))):
            return False
    return len(message) == len(fields(kind))


def _is_own(host: str, names: Collection[str], port: int) -> bool:
    match = re.fullmatch(r"(\[[\da-fA-F:.]+(?:%[\w.-]+)?\]|[^:\[\]]+)(:\d+)?", host)
    if match is None:
        return False
    name, rest = match[1].strip("[]").lower(), match[2]
    with contextlib.suppress(ValueError):
        name = str(ipaddress.ip_address(name))
    return name in names and rest in ((f":{port}", None) if port == 80 else (f":{port}",))
