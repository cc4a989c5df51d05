"""The template of all jobs: built in, or a file. HCL is read by Nomad itself, when it is first needed."""

from pathlib import Path

import trio

from poseidon.errors import ConfigError, ExecutorError
from poseidon.executors.nomad import job as jobs
from poseidon.executors.nomad.client import JSON, Client, Refused, path_of
from poseidon.executors.nomad.job import Json


class Template:
    """*text* is the file's, unless *ready* is known without asking Nomad."""

    def __init__(self, client: Client, *, ready: Json | None = None, text: str = "") -> None:
        self._client = client
        self._ready = ready
        self._text = text
        self._lock = trio.Lock()

    @classmethod
    def load(cls, client: Client) -> "Template":
        """Read the file, if there is one. Raises ConfigError."""
        file = client.settings.template_job_file
        if not file:
            return cls(client, ready=jobs.built_in(client.settings))
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"nomad.template_job_file: {file}: {getattr(error, 'strerror', None) or error}"
            ) from error
        return cls(client, ready=jobs.read_json(text, file), text=text)

    @property
    def known(self) -> Json | None:
        """The job, if it has been read."""
        return self._ready

    async def read(self) -> Json:
        """Raises ExecutorUnreachable; ExecutorError for a file that Nomad doesn't understand."""
        async with self._lock:
            if self._ready is None:
                self._ready = await self._parse()
            return self._ready

    async def _parse(self) -> Json:
        file = self._client.settings.template_job_file
        try:
            body = {"JobHCL": self._text, "Canonicalize": False}
            return await self._client.put(path_of("jobs", "parse"), body, JSON)
        except Refused as error:
            raise ExecutorError(f"nomad.template_job_file: {file}: {error.message}") from error
