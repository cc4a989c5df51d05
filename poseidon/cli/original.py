"""The original's configuration.yaml in our words. Pure: text in, settings and remarks out.

Each of its keys is either translated or reported. Nothing that it says is dropped in silence.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from poseidon.config_kinds import KeyPath
from poseidon.config_original import FORMATS, LEVELS, NEEDLESS, RENAMED, UNSUPPORTED
from poseidon.errors import ConfigError

LARGEST = 1024 * 1024
DEEPEST, MOST = 8, 10_000
"""What a configuration never has; aliases of YAML can make it of little text."""


@dataclass(slots=True)
class Translation:
    """What became of a file."""

    settings: dict[KeyPath, Any] = field(default_factory=dict)
    """Ours, by path."""
    remarks: list[str] = field(default_factory=list)
    """What isn't taken over, or only nearly; a line each."""
    problems: list[str] = field(default_factory=list)
    """What the original itself would refuse."""

    def as_toml(self) -> str:
        """The settings as a file of ours."""
        tables: dict[KeyPath, list[str]] = {}
        for path, value in self.settings.items():
            tables.setdefault(path[:-1], []).append(f"{path[-1]} = {_toml(value)}")
        parts = ["\n".join([f"[{'.'.join(table)}]", *lines]) for table, lines in sorted(tables.items())]
        return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of the file, and where it stands."""

    path: str
    value: Any
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.path}"


class _Wrong(Exception):
    """A value of another kind than the key takes; the message says which one it takes."""


Convert = Callable[[Any], Any]


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _Wrong("text")
    return str(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong("a number")
    return float(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _host(value: Any) -> str:
    return _text(value).strip("[]")


def _level(value: Any) -> str:
    return _chosen(value, LEVELS)


def _format(value: Any) -> str:
    return _chosen(value, FORMATS)


def _chosen(value: Any, words: Mapping[str, str]) -> str:
    try:
        return words[_text(value).lower()]
    except KeyError:
        raise _Wrong("one of " + ", ".join(words)) from None


TRANSLATED: Mapping[str, tuple[KeyPath, Convert]] = {
    "server.address": (("server", "address"), _host),
    "server.port": (("server", "port"), _whole),
    "server.token": (("server", "token"), _text),
    "server.tls.active": (("server", "tls", "active"), _truth),
    "server.tls.cafile": (("server", "tls", "ca_file"), _text),
    "server.tls.certfile": (("server", "tls", "cert_file"), _text),
    "server.tls.keyfile": (("server", "tls", "key_file"), _text),
    "server.templatejobfile": (RENAMED["server.templatejobfile"], _text),
    "server.alert.prewarmingpoolthreshold": (("server", "alert", "prewarming_pool_threshold"), _number),
    "server.prewarmingpoolalertthreshold": (RENAMED["server.prewarmingpoolalertthreshold"], _number),
    "nomad.enabled": (("nomad", "enabled"), _truth),
    "nomad.address": (("nomad", "address"), _host),
    "nomad.port": (("nomad", "port"), _whole),
    "nomad.token": (("nomad", "token"), _text),
    "nomad.tls.active": (("nomad", "tls", "active"), _truth),
    "nomad.tls.cafile": (("nomad", "tls", "ca_file"), _text),
    "nomad.tls.certfile": (("nomad", "tls", "cert_file"), _text),
    "nomad.tls.keyfile": (("nomad", "tls", "key_file"), _text),
    "nomad.namespace": (("nomad", "namespace"), _text),
    "nomad.disableforcepull": (("nomad", "disable_force_pull"), _truth),
    "nomad.network.mode": (("nomad", "network", "mode"), _text),
    "logger.level": (RENAMED["logger.level"], _level),
    "logger.formatter": (RENAMED["logger.formatter"], _format),
}
OFF: tuple[object, ...] = (None, False, 0, "", [], {})
"""What isn't worth a remark where something isn't supported: the original's own defaults."""
CLUSTER = "127.0.0.1"
"""Where the original looks for Nomad if nothing is said; ours uses a cluster only if it is told one."""


def translate(text: str, folder: Path) -> Translation:
    """The settings of *text*, a file of *folder*. Raises ConfigError if it is no YAML, or no configuration."""
    found = Translation()
    for entry in _entries(text):
        _translate_one(entry, found)
    _complete(found, folder)
    return found


def _translate_one(entry: Entry, found: Translation) -> None:
    area = next((known for known in UNSUPPORTED if f"{entry.path}.".startswith(f"{known}.")), None)
    if entry.path in TRANSLATED:
        path, convert = TRANSLATED[entry.path]
        try:
            if entry.value is not None:  # a key without a value leaves the default
                found.settings[path] = convert(entry.value)
        except _Wrong as error:
            found.problems.append(f"{entry}: expected {error}")
    elif entry.path in NEEDLESS:
        found.remarks.append(f"{entry}: {NEEDLESS[entry.path]}")
    elif area is None and not _is_empty_table(entry):
        found.remarks.append(f"{entry}: unknown, the original takes no notice of it either")
    elif area is not None and entry.value not in OFF:
        found.remarks.append(f"{entry}: {UNSUPPORTED[area]}")


def _is_empty_table(entry: Entry) -> bool:
    known = (*TRANSLATED, *NEEDLESS, *UNSUPPORTED)
    return entry.value in OFF and any(each.startswith(f"{entry.path}.") for each in known)


def _complete(found: Translation, folder: Path) -> None:
    """What the original presumes and ours doesn't."""
    settings = found.settings
    if settings.get(("nomad", "enabled"), True):
        settings.setdefault(("nomad", "address"), CLUSTER)
    else:
        found.remarks.append("nomad.enabled: without it, programs run in sandboxes of this machine")
    if settings.get(("server", "tls", "active")):
        settings[("server", "tls", "min_version")] = "1.3"
    for path, value in settings.items():
        if path[-1].endswith("_file") and value:
            settings[path] = str(folder / value)
            if not value.startswith("/"):
                found.remarks.append(f"{'.'.join(path)}: {value} is taken to lie in {folder}")


def _entries(text: str) -> list[Entry]:
    """Every leaf of the file."""
    try:
        tree = yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"isn't valid YAML: line {line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"isn't valid YAML: {str(error).splitlines()[0]}") from error
    if tree is None or (isinstance(tree, yaml.ScalarNode) and not tree.value):
        return []
    if not isinstance(tree, yaml.MappingNode):
        raise ConfigError("isn't a configuration: a mapping of keys is expected")
    found: list[Entry] = []
    for entry in _leaves(tree, (), 0):
        found.append(entry)
        if len(found) > MOST:
            raise ConfigError(f"isn't a configuration: it has more than {MOST} entries")
    return found


def _leaves(node: yaml.MappingNode, before: tuple[str, ...], depth: int) -> Iterator[Entry]:
    for key, value in node.value:
        path = (*before, str(key.value) if isinstance(key, yaml.ScalarNode) else "?")
        if isinstance(value, yaml.MappingNode) and value.value and depth < DEEPEST:
            yield from _leaves(value, path, depth + 1)
        else:
            yield Entry(".".join(path), _plain(value), key.start_mark.line + 1)


def _plain(node: yaml.Node) -> Any:
    """The value of a scalar; of all else only that there is something, for no key of ours wants it."""
    if not isinstance(node, yaml.ScalarNode):
        return [...] if node.value else []
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):  # a date like 2026-99-99
        return node.value


def _toml(value: Any) -> str:
    text = value if not isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(text).lower() if isinstance(value, bool) else str(text)
