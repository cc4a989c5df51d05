"""The argument vectors that run a command inside an allocation, watch its stderr, signal it and kill it. Pure.

Words are passed on as they are, as positional parameters, and never become part of a script: nothing needs quoting.
The scripts need bash, and of programs only those that the original needs from an image (`stty` is used if it is there).
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from poseidon.core.command import LARGEST_ARGUMENT, Command
from poseidon.errors import BadRequest

BASH = "/bin/bash"
MARKS = range(819_200 - 65_536, 819_200)
"""Hard limits of message queues' bytes (the default is 819,200): room for as many queues as ever, and many marks."""

NONCE_WITHIN = 60
"""Seconds after which a script gives up that was told nothing; nothing has run by then."""

RUN = r"""
mark=$1 fifo=$2 rows=$3 columns=$4
shift 4
unset "${!NOMAD_@}"
trap : INT QUIT TERM PIPE
exec 4>&2 2>/dev/null
ulimit -q "$mark" || mark=0
read -r line </proc/$$/stat
self=(${line##*) })
kills() {
  count=0
  while read -r word number; do
    [[ $word != oom_kill ]] || count=$number
  done <"$events"
}
for events in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
  [[ ! -r $events ]] || break
done
kills
before=$count
printf '\036ready %d %d %d %d %d\036' $$ "${self[19]}" "${self[3]}" "${self[1]}" "$mark"
IFS= read -rs -t NONCE_WITHIN nonce && [[ $nonce == [0-9]* ]] || exit 125
[[ -z $fifo ]] || { exec 5<>"$fifo" && exec 4>"$fifo" 5>&-; } || exit 125
[[ -z $rows ]] || stty rows "$rows" cols "$columns"
printf '\036%s\036' "$nonce"
[[ -n $fifo ]] || printf '\036%s\036' "$nonce" >&4
{ "$@" 4>&-; } 2>&4
code=$? left=0 starved=0
if [[ $code == 137 ]]; then
  kills
  ((count <= before)) || starved=1
fi
if [[ ${self[1]} == 0 && ${self[3]} == $$ ]]; then
  for path in /proc/[0-9]*/stat; do
    IFS= read -r -d '' line <"$path"
    fields=(${line##*) })
    [[ ${fields[3]} != $$ || ${fields[0]} == Z || ${line%% *} == $$ ]] || left=1
  done
fi
printf '\036%s %d %d %d\036' "$nonce" "$code" "$left" "$starved"
[[ -n $fifo ]] || printf '\036%s\036' "$nonce" >&4
exit "$code"
""".strip().replace("NONCE_WITHIN", str(NONCE_WITHIN))
"""Says that it is ready, and which process it is; waits for the nonce; runs its words; tells how they ended.

Each stream begins and ends with a mark, for they overtake each other on the way.

Its own complaints aren't the command's. The limit marks all that descends from it, also what leaves its session, and
nobody without privileges can lift it. The nonce is of digits, which no mode of a terminal changes.
"""

STDERR = r"""
fifo=$1
trap 'rm -f -- "$fifo"' EXIT
trap : PIPE
mkfifo -m 622 -- "$fifo" && exec 3<>"$fifo" 4<"$fifo" || exit 125
printf '\036ready\036'
IFS= read -r -t NONCE_WITHIN nonce && [[ $nonce == [0-9]* ]] || exit 125
exec 3>&-
cat <&4
exec 4<&-
rm -f -- "$fifo"
printf '\036%s\036' "$nonce"
""".strip().replace("NONCE_WITHIN", str(NONCE_WITHIN))
"""Makes the fifo, holds it open at both ends until the command has opened it too, then passes on what comes."""

LOOK = r"""
exec 2>/dev/null
pid=$1 start=$2 session=$3 parent=$4 mark=$5 number=$6
declare -A parents groups sessions terminals born kinds reapers=([1]=1)
look() {
  parents=() groups=() sessions=() terminals=() born=() kinds=()
  for path in /proc/[0-9]*/stat; do
    line=
    IFS= read -r -d '' line <"$path"
    fields=(${line##*) }) each=${line%% *}
    [[ -n $line && ${fields[0]} != [ZX] ]] || continue
    parents[$each]=${fields[1]} groups[$each]=${fields[2]} sessions[$each]=${fields[3]}
    terminals[$each]=${fields[5]} born[$each]=${fields[19]}
  done
}
kind() {
  local each=$1 up=${parents[$1]} text= limits
  [[ -z ${kinds[$each]} ]] || return
  kinds[$each]=unknown
  if ((born[$each] < start || each == $$)); then
    kinds[$each]=foreign
    return
  fi
  IFS= read -r -d '' text <"/proc/$each/limits"
  limits=(${text##*msgqueue size})
  if ((mark)) && [[ ${limits[1]} == "$mark" ]] || [[ $session == "$pid" && ${sessions[$each]} == "$pid" ]]; then
    kinds[$each]=ours
  elif ((up == 0)) || { ((mark)) && [[ ${limits[1]} == unlimited || ${limits[1]} -gt $mark ]]; }; then
    kinds[$each]=foreign
  elif [[ -n ${parents[$up]} ]]; then
    kind "$up"
    [[ ${kinds[$up]} != ours ]] || kinds[$each]=ours
    [[ ${kinds[$up]} != foreign || -n ${reapers[$up]} ]] || kinds[$each]=foreign
  fi
}
judge() {
  ours=() unknown=0 wrapper=0
  for each in "${!parents[@]}"; do
    kind "$each"
    case ${kinds[$each]} in
      ours) if ((each == pid && born[$each] == start)); then wrapper=1; else ours+=("$each"); fi ;;
      unknown) unknown=1 ;;
    esac
  done
}
look
while [[ -n ${parents[$parent]} && -z ${reapers[$parent]} ]]; do
  reapers[$parent]=1 parent=${parents[$parent]}
done
""".strip()
"""Sees whose each process is.

Ours: marked, or of the command's session, or a child of one that is ours. Foreign: older than the command, begun from
outside of the container, with a higher limit than the mark (it can't be raised), or a child of a foreign one that
couldn't have inherited ours. All else is unknown.
"""

SIGNAL = (
    LOOK
    + r"""
judge
group=${terminals[$pid]}
[[ $group -gt 0 ]] || group=${groups[$pid]}
for each in "${ours[@]}"; do
  [[ ${groups[$each]} != "$group" || $wrapper == 0 ]] || kill -"$number" "$each"
done
printf '\036done\036'
"""
)

KILL = (
    LOOK
    + r"""
clean=0 waited=0 doubts=0
for ((round = 0; round < number; round++)); do
  judge
  if ((${#ours[@]})); then
    kill -STOP "${ours[@]}"
    kill -KILL "${ours[@]}"
    clean=0
  elif ((wrapper)); then
    ((++waited < 30)) || kill -KILL "$pid"
  elif ((unknown)); then
    ((++doubts < 20)) || break
  elif ((++clean == 2)); then
    printf '\036done 1\036'
    exit
  fi
  read -r -t 0.01 _
  look
done
printf '\036done 0\036'
"""
)
"""The wrapper is spared at first: it tells how its command ended. STOP comes first, so that none can fork meanwhile."""
KILL_ROUNDS = 250


@dataclass(frozen=True, slots=True)
class Running:
    """What a command's wrapper told of itself; all that is needed to find it and its descendants again."""

    pid: int
    start: int
    session: int
    parent: int
    """0: begun from outside of its process namespace."""
    mark: int
    """0: it couldn't be set."""


def run_words(command: Command, *, set_user: str, mark: int, fifo: str = "") -> tuple[str, ...]:
    """Run *command*, stderr to *fifo* if given. Raises BadRequest."""
    size = (str(command.rows), str(command.columns)) if command.tty and command.rows and command.columns else ("", "")
    words = (BASH, "-c", RUN, "bash", str(mark), fifo, *size, *_with_environment(command, set_user))
    return _checked(words)


def stderr_words(fifo: str) -> tuple[str, ...]:
    """Make *fifo*, and write to stdout what comes out of it."""
    return (BASH, "-c", STDERR, "bash", fifo)


def signal_words(running: Running, number: int) -> tuple[str, ...]:
    """Send a signal to the foreground processes of a command."""
    return (BASH, "-c", SIGNAL, "bash", *_told(running), str(number))


def kill_words(running: Running) -> tuple[str, ...]:
    """Kill a command with all that descends from it."""
    return (BASH, "-c", KILL, "bash", *_told(running), str(KILL_ROUNDS))


def _told(running: Running) -> tuple[str, ...]:
    return tuple(str(number) for number in (running.pid, running.start, running.session, running.parent, running.mark))


def _with_environment(command: Command, set_user: str) -> tuple[str, ...]:
    user = () if command.privileged else tuple(shlex.split(set_user))
    return (*user, "env", "CODEOCEAN=true", *_entries(command.environment), *_program(command))


def _entries(environment: Mapping[str, str]) -> Sequence[str]:
    """CODEOCEAN comes first and can't be told otherwise; so nothing that follows looks like an option of env."""
    for name in environment:
        if not name or "=" in name:
            raise BadRequest(f"{name!r} can't be the name of an environment variable")
    return [f"{name}={value}" for name, value in environment.items() if name != "CODEOCEAN"]


def _program(command: Command) -> tuple[str, ...]:
    program = command.argv or (BASH, "-c", *(("--",) if command.line[:1] in ("-", "+") else ()), command.line)
    if command.cwd:
        return (BASH, "-c", 'cd -- "$1" || exit 126; shift; exec -- "$@"', "bash", command.cwd, *program)
    if "=" in program[0]:  # env would take it for a variable
        return (BASH, "-c", 'exec -- "$@"', "bash", *program)
    return program


def _checked(words: tuple[str, ...]) -> tuple[str, ...]:
    for word in words:
        try:
            data = word.encode()
        except UnicodeEncodeError as error:
            raise BadRequest("the command or its environment isn't valid Unicode") from error
        if b"\0" in data:
            raise BadRequest("the command or its environment holds a NUL character")
        if len(data) > LARGEST_ARGUMENT:
            raise BadRequest(f"the command or an entry of its environment exceeds {LARGEST_ARGUMENT} bytes")
    return words
