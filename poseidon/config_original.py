"""What became of the original's settings that have another name or none here; for its file and its variables. Pure."""

from collections.abc import Mapping

from poseidon.config_kinds import KeyPath

RENAMED: Mapping[str, KeyPath] = {
    "server.templatejobfile": ("nomad", "template_job_file"),
    "server.prewarmingpoolalertthreshold": ("server", "alert", "prewarming_pool_threshold"),  # of older versions
    "logger.level": ("logging", "level"),
    "logger.formatter": ("logging", "format"),
}
LEVELS: Mapping[str, str] = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
    "panic": "error",
}
FORMATS: Mapping[str, str] = {"textformatter": "console", "jsonformatter": "json"}
WORDS: Mapping[str, Mapping[str, str]] = {"logger.level": LEVELS, "logger.formatter": FORMATS}

NEEDLESS: Mapping[str, str] = {
    "server.systemdsocketactivation": "not needed: sockets that systemd hands over are used anyway",
    "server.interactivestderr": "not needed: stderr is always told apart",
    "server.alert.prewarmingpoolreloadtimeout": "not needed: pools are compared with the cluster all the time",
    "server.loggingfiltertoken": "not needed: the watchdog asks nothing by HTTP",
}
UNSUPPORTED: Mapping[str, str] = {
    "aws": "AWS Lambda isn't supported",
    "profiling": "not supported; a profiler like py-spy can look into the running process",
    "sentry": "not taken over",
    "influxdb": "not taken over",
    "nomad.network": "not supported; say it in the job of nomad.template_job_file",
}

_PREFIX = "POSEIDON_"


def renamed(environ: Mapping[str, str]) -> dict[str, str]:
    """*environ* with the original's names and words for our settings as ours; a variable of ours wins."""
    found = dict(environ)
    for name, path in RENAMED.items():
        old, new = _variable(name.split(".")), _variable(path)
        if old in found:
            value = found.pop(old)
            found.setdefault(new, WORDS.get(name, {}).get(value.lower(), value))
    return found


def left_out(variable: str) -> str | None:
    """Why a variable of the original has no effect here; None if it is none of its own."""
    flat = variable.removeprefix(_PREFIX).replace("_", "").upper()
    for name, reason in NEEDLESS.items():
        if flat == _flat(name):
            return reason
    return next((reason for area, reason in UNSUPPORTED.items() if flat.startswith(_flat(area))), None)


def _variable(path: tuple[str, ...] | list[str]) -> str:
    return _PREFIX + "_".join(path).upper()


def _flat(name: str) -> str:
    return name.replace(".", "").upper()
