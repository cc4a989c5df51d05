"""Where settings come from: a TOML file, environment variables, secret files; and how their problems are told.

Knows no setting by name: which there are, and of which kind, follows from the pydantic model that it is given.
"""

import difflib
import json
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from poseidon.config_kinds import HASHED, KeyPath, as_model, explain, is_table, item_of_list, leaves, value_of_table
from poseidon.errors import ConfigError

PREFIX = "POSEIDON_"
TOOLING = frozenset({"POSEIDON_URL", "POSEIDON_TOKEN", "POSEIDON_TOKEN_FILE", "POSEIDON_CA_FILE", "POSEIDON_DEBUG"})
"""Variables of the command line, which are no settings."""

M = TypeVar("M", bound=BaseModel)
Tree = dict[str, Any]

_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(slots=True)
class Sources:
    """What file and variables say, merged; and which of them said what."""

    tree: Tree = field(default_factory=dict)
    file: Path | None = None
    variables: dict[KeyPath, str] = field(default_factory=dict)
    """Names of the variables that set something, by the path of what they set."""
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What is no problem, but should be known: variables without an effect, secrets that all can read."""

    def setter(self, path: Sequence[str]) -> KeyPath | None:
        """The part of *path* that a variable has set, itself or with a table round it."""
        parts = (tuple(path[:length]) for length in range(len(path), 0, -1))
        return next((part for part in parts if part in self.variables), None)

    def label(self, path: Sequence[str]) -> str:
        """How a message names the setting at *path*: by the variable that set it, else by file and key."""
        if part := self.setter(path):
            return ": ".join([self.variables[part], *filter(None, [".".join(path[len(part) :])])])
        return f"{self.file}: {'.'.join(path)}" if self.file else ".".join(path)

    def complain(self, path: Sequence[str], problem: str) -> None:
        self.problems.append(f"{self.label(path)}: {problem}")

    def base(self, path: KeyPath) -> Path:
        """The folder that a relative path in this setting starts from."""
        return Path.cwd() if self.file is None or self.setter(path) else self.file.parent

    def get(self, path: KeyPath) -> Any:
        """The value at *path*, or None."""
        node: Any = self.tree
        for key in path:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def put(self, path: KeyPath, value: Any) -> None:
        """Set *path* to *value*, unless the file has something there that isn't a table (reported by validation)."""
        node: Any = self.tree
        for key in path[:-1]:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node[path[-1]] = value


def gather(
    model: type[BaseModel],
    file: Path | None,
    environ: Mapping[str, str],
    left_out: Callable[[str], str | None] = lambda _: None,
) -> Sources:
    """Merge *file* and the variables, which win, and read the secrets that are kept in files of their own.

    *left_out* tells of a variable that sets nothing why that is fine; None: it isn't.
    """
    sources = Sources(tree=read_toml(file) if file else {}, file=file)
    if file and any(_is_told(sources.get(path)) for path in _secret_paths(model, sources)):
        _notice_if_open(sources, file)
    _open_secret_files(model, sources, sources.get)
    _take_credentials(model, sources, environ)
    _apply_variables(model, sources, environ, left_out)
    _open_secret_files(model, sources, lambda path: sources.get(path) if sources.setter(path) else None)
    _anchor_files(model, sources)
    return sources


def validated(model: type[M], sources: Sources) -> M:
    """The settings, or one ConfigError with a line for each problem."""
    settings = None
    try:
        settings = model.model_validate(_with_tuples(sources.tree))
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=True):
            path = [str(key) for key in detail["loc"]]
            sources.complain(path if path[-1] != "[key]" else path[:-1], explain(model, path, detail))
    if settings is None or sources.problems:
        raise ConfigError("\n".join(sources.problems))
    return settings


def read_toml(file: Path) -> Tree:
    """The tables of *file*."""
    try:
        return tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: isn't UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: isn't valid TOML: {str(error)[:200]}") from error


def variable_name(path: Sequence[str]) -> str:
    return PREFIX + "_".join(path).upper()


def _apply_variables(
    model: type[BaseModel], sources: Sources, environ: Mapping[str, str], left_out: Callable[[str], str | None]
) -> None:
    found: list[tuple[KeyPath, FieldInfo, str]] = []
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in TOOLING:
            continue
        target = _target(model, name.removeprefix(PREFIX).replace("_", "").upper())
        if target is None and (reason := left_out(name)):
            sources.remarks.append(f"{name}: {reason}")
        elif target is None:
            sources.problems.append(f"{name}: unknown variable{_suggest_variable(model, name)}")
        elif target[0] in sources.variables:
            sources.problems.append(f"{name}: sets the same as {sources.variables[target[0]]}")
        else:
            sources.variables[target[0]] = name
            found.append((*target, environ[name]))
    for path, info, text in sorted(found, key=lambda item: len(item[0])):  # whole tables before what is in them
        sources.put(path, _from_text(info, text))


def _target(model: type[BaseModel], flat: str) -> tuple[KeyPath, FieldInfo] | None:
    for name, info in model.model_fields.items():
        key = name.replace("_", "").upper()
        if flat.startswith(key) and (found := _target_below(info, flat[len(key) :])):
            return (name, *found[0]), found[1]
    return None


def _target_below(info: FieldInfo, flat: str) -> tuple[KeyPath, FieldInfo] | None:
    if not flat:
        return (), info
    if table := as_model(info.annotation):
        return _target(table, flat)
    inner = value_of_table(info)
    numbered = re.match(r"\d+", flat)
    if inner and numbered and (found := _target_below(inner, flat[numbered.end() :])):
        return (numbered[0], *found[0]), found[1]
    return None


def _from_text(info: FieldInfo, text: str) -> Any:
    """*text* as the kind of value that *info* wants; the text itself where it can't be (validation will tell)."""
    kind = info.annotation
    if kind is bool:
        return _BOOLEANS.get(text.strip().lower(), text)
    if kind is int or kind is float:
        try:
            return kind(text)
        except ValueError:
            return text
    item = item_of_list(info)
    if item and not text.lstrip().startswith("["):
        return [_from_text(item, word) for word in re.split(r"[\s,]+", text.strip().strip('"')) if word]
    return _structure(text) if item or is_table(info) else text


def _structure(text: str) -> Any:
    """A list or table written as JSON, or as a TOML value."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _suggest_variable(model: type[BaseModel], name: str) -> str:
    known = [variable_name(path) for path, _ in leaves(model)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def _secret_paths(model: type[BaseModel], sources: Sources) -> list[KeyPath]:
    """Where a table's keys are free, one for each key that is there."""
    return _present(model, sources, lambda _, info: not info.repr)


def _present(model: type[BaseModel], sources: Sources, wanted: Callable[[KeyPath, FieldInfo], bool]) -> list[KeyPath]:
    patterns = [path for path, info in leaves(model) if wanted(path, info)]
    return [path for pattern in patterns for path in _filled_in(pattern, sources)]


def _filled_in(pattern: KeyPath, sources: Sources) -> list[KeyPath]:
    if "N" not in pattern:
        return [pattern]
    place = pattern.index("N")
    table = sources.get(pattern[:place])
    keys = table if isinstance(table, dict) else ()
    return [(*pattern[:place], str(key), *pattern[place + 1 :]) for key in keys]


def _open_secret_files(model: type[BaseModel], sources: Sources, layer: Callable[[KeyPath], Any]) -> None:
    """Put what the `…_file` settings of one layer (file or variables) name in the place of the secrets themselves."""
    for path in _secret_paths(model, sources):
        key = (*path[:-1], f"{path[-1]}_file")
        name = layer(key)
        if not name or not isinstance(name, str):
            continue
        if layer(path):
            sources.complain(key, f"give this or {'.'.join(path)}, not both")
        elif secret := _read_secret(sources, key, sources.base(key) / name):
            sources.put(path, secret)


def _anchor_files(model: type[BaseModel], sources: Sources) -> None:
    """Make relative paths of files absolute, while it is known where they were written."""
    for path in _present(model, sources, lambda path, _: path[-1].endswith("_file")):
        name = sources.get(path)
        if name and isinstance(name, str):
            sources.put(path, str(sources.base(path) / name))


def _take_credentials(model: type[BaseModel], sources: Sources, environ: Mapping[str, str]) -> None:
    """systemd's credentials: files in a folder of the service's own, named like the setting."""
    folder = environ.get("CREDENTIALS_DIRECTORY")
    for path in _secret_paths(model, sources) if folder else ():
        file = Path(folder or "", ".".join(path))
        if file.exists() and (secret := _read_secret(sources, path, file)):
            sources.put(path, secret)


def _read_secret(sources: Sources, path: KeyPath, file: Path) -> str | None:
    try:
        secret = file.read_text("utf-8").strip()
    except OSError as error:
        sources.complain(path, f"{file}: {error.strerror}")
    except UnicodeDecodeError:
        sources.complain(path, f"{file}: isn't UTF-8 text")
    else:
        if secret and secret.isprintable():
            if _is_told(secret):
                _notice_if_open(sources, file)
            return secret
        sources.complain(path, f"{file}: expected one line with the secret")
    return None


def _is_told(secret: Any) -> bool:
    """Whether *secret* gives something away to who reads it."""
    return isinstance(secret, str) and bool(secret) and not secret.startswith(HASHED)


def _notice_if_open(sources: Sources, file: Path) -> None:
    with suppress(OSError):
        if file.stat().st_mode & stat.S_IROTH:
            sources.remarks.append(f"{file} holds a secret that everybody on this machine can read (chmod o-r)")


def _with_tuples(node: Any) -> Any:
    """Lists as tuples, which is what strict validation takes for an immutable list."""
    if isinstance(node, dict):
        return {key: _with_tuples(value) for key, value in node.items()}
    return tuple(_with_tuples(value) for value in node) if isinstance(node, list) else node
