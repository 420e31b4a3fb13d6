"""As much of the Docker engine's API on a unix socket as a proxy before it can tell."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class FakeEngine:
    """Containers by id. ``seen`` are method and target of all requests, ``attached`` what containers were told."""

    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    attached: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an attached connection's input has ended."""

    async def start(self, path: Path) -> asyncio.Server:
        return await asyncio.start_unix_server(self._serve, path)

    def add(self, number: int, labels: dict[str, str]) -> str:
        container = f"{number:064x}"
        self.containers[container] = {"Config": {"Labels": labels}}
        return container

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split("\r\n")[0].split(" ")
        length = next(
            (int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0
        )
        body = await reader.readexactly(length)
        self.seen.append(f"{method} {target}")
        if target.split("?")[0].endswith("/attach"):
            await self._attach(reader, writer)
        else:
            status, answer = self._answer(method, target, body)
            data = json.dumps(answer).encode()
            sent = f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"
            writer.write(f"HTTP/1.1 {status} -\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + sent)
        writer.close()

    async def _attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        try:
            while data := await reader.read(1000):
                self.attached += data
                writer.write(data.upper())
            writer.write(b"bye")
        finally:
            self.ended.set()

    def _answer(self, method: str, target: str, body: bytes) -> tuple[int, Any]:
        parts = urlsplit(target)
        words = parts.path.strip("/").split("/")
        if words[-1] == "info":
            return 200, {"Runtimes": {"runc": {}}, "Name": "the host"}
        if words[-1] == "create":
            labels = json.loads(body)["Labels"]
            return 201, {"Id": self.add(len(self.containers) + 100, labels)}
        if parts.path.endswith("/containers/json"):
            wanted = json.loads(parse_qs(parts.query)["filters"][0])["label"]
            return 200, [{"Id": each} for each in self.containers if self._has(each, wanted)]
        container = words[words.index("containers") + 1] if "containers" in words else ""
        if container not in self.containers:
            return 404, {"message": "nothing there"}
        if method == "DELETE":
            del self.containers[container]
        return (204, None) if method != "GET" else (200, self.containers[container])

    def _has(self, container: str, wanted: list[str]) -> bool:
        labels = self.containers[container]["Config"]["Labels"]
        have = {f"{name}={value}" for name, value in labels.items()} | set(labels)
        return set(wanted) <= have
