"""Checks JSON schemas before any worker sees them, in a process that can be ended."""

import asyncio
import contextlib
import sys

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest, Overloaded
from shared.messages.request import Grammar

MAX_SCHEMA = 64 << 10
"""Bytes of the longest schema taken."""
START_TIMEOUT = 30.0
"""Seconds the checker may take to load xgrammar (and torch with it), once."""
CHECK_TIMEOUT = 3.0
"""Seconds one schema may take."""
MAX_WAITING = 64


class Verdict(Struct, frozen=True):
    """What the checker found; no ``error``: the schema can be used."""

    error: str | None = None


class GrammarChecker:
    """Compiles schemas with xgrammar in a child process, started when first needed.

    xgrammar is native code fed by clients: out here a schema that takes for ever or crashes
    it costs one answer, not the gateway.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._waiting = 0
        self._known: dict[str, None] = {}

    async def check(self, schema: str, param: str) -> Grammar:
        """Return the grammar of a schema.

        Raises:
            InvalidRequest: too long, not a schema, or too costly to compile.
            Overloaded: too many schemas wait for their check.
        """
        if len(schema.encode()) > MAX_SCHEMA:
            raise InvalidRequest(f"the schema is longer than {MAX_SCHEMA} bytes", param=param)
        if schema not in self._known:
            if self._waiting >= MAX_WAITING:
                raise Overloaded("too many JSON schemas wait for their check", retry_after=1.0)
            self._waiting += 1
            try:
                async with self._lock:
                    await self._compile(schema, param)
            finally:
                self._waiting -= 1
            while len(self._known) >= MAX_WAITING:
                del self._known[next(iter(self._known))]
            self._known[schema] = None
        return Grammar(kind="json_schema", schema=schema)

    async def close(self) -> None:
        """End the child process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _compile(self, schema: str, param: str) -> None:
        try:
            if self._process is None:
                async with asyncio.timeout(START_TIMEOUT):
                    await self._start()
            async with asyncio.timeout(CHECK_TIMEOUT):
                verdict = await self._ask(schema)
        except (TimeoutError, ConnectionError, EOFError, msgspec.MsgspecError) as error:
            await self.close()
            why = "takes too long" if isinstance(error, TimeoutError) else "fails"
            raise InvalidRequest(f"compiling the JSON schema {why}", param=param) from error
        except asyncio.CancelledError:
            await self.close()
            raise
        if verdict.error is not None:
            raise InvalidRequest(f"invalid JSON schema: {verdict.error}", param=param)

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.gateway.grammar_child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        await self._read()

    async def _ask(self, schema: str) -> Verdict:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(schema) + b"\n")
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> Verdict:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError("the schema checker ended")
        return msgspec.json.decode(line, type=Verdict)
