"""The faults that the core's tests must notice: what the design warns of, and what its rules have taught us since."""
# ruff: noqa: E501 – the code is quoted as it stands

from dataclasses import dataclass

Edit = tuple[str, str, str]
"""File of the core, the text, what it becomes."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. *edits* may be several where the rule is held in several places."""

    name: str
    fault: str
    edits: tuple[Edit, ...]


def _fleet(name: str, fault: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, fault, tuple(("fleet.py", old, new) for old, new in changes))


def _roster(name: str, fault: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, fault, tuple(("roster.py", old, new) for old, new in changes))


def _rules(name: str, fault: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, fault, tuple(("rules.py", old, new) for old, new in changes))


def _pool(name: str, fault: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(name, fault, tuple(("pool.py", old, new) for old, new in changes))


def _strange(name: str, fault: str, *changes: tuple[str, str]) -> Mutant:
    files = ["rules.py" if "stopped" in old else "roster.py" for old, _ in changes]
    edits = tuple((file, old, new) for file, (old, new) in zip(files, changes, strict=True))
    return Mutant(name, fault, edits)


MUTANTS = (
    # Those that the design names
    _fleet(
        "same-version-wins",
        "version compared with < instead of <=",
        ("elif new.version <= known.version:", "elif new.version < known.version:"),
    ),
    _fleet("any-slot", "no check of slot", ("if new.slot != 0:", "if new.slot < 0:")),
    _rules("migrate-ignored", "asked-to-migrate ignored", ("        and not allocation.migrate\n", "")),
    _rules("life-without-start", "life without the start", (" and current.started == runner.started", "")),
    _rules(
        "older-comes-back",
        "an older allocation comes back after the newer failed",
        (" and allocation.version >= newest", ""),
    ),
    _fleet(
        "absent-jobs-ignored",
        "absence of a job in a listing ignored",
        ("entry.job.id not in jobs, allocations)", "False, allocations)"),
        ("elif not present and self._is_over(entry, listing):", "elif False:"),
    ),
    _fleet(
        "absent-allocations-ignored",
        "absence of an allocation in a listing ignored",
        ("if allocation.id not in allocations and", "if False and"),
    ),
    _fleet(
        "job-absence-without-index",
        "absence of a job in a listing used without its index",
        ("            and job.version <= listing.jobs_index\n", ""),
        ("and job.version <= listing.jobs_index and self._current", "and self._current"),
    ),
    _fleet(
        "allocation-absence-without-index",
        "absence of an allocation in a listing used without its index",
        (" and allocation.version <= listing.allocations_index", ""),
    ),
    _fleet(
        "listing-one-by-one",
        "listing applied one by one",
        (
            "        decisions: list[Decision] = []\n        if listing.jobs_only:",
            "        decisions = [d for v in (*listing.jobs, *listing.allocations) for d in self.handle(v, now)]\n"
            "        if listing.jobs_only:",
        ),
    ),
    _fleet(
        "unanswered-start-absent",
        "an unanswered start treated as absent",
        ("            and not rules.awaits_start(job)\n", ""),
        ("return not rules.awaits_start(job) and job.version", "return job.version"),
    ),
    _fleet(
        "first-listing-decides",
        "doubt decided by the first listing",
        ("asked.at >= job.doubtful_since + self._settle", "asked.at >= 0"),
    ),
    _fleet(
        "overdue-reset",
        "Overdue reset by further allocations",
        (
            "lifeless_since = (job.lifeless_since if job.lifeless_since is not None else now)",
            "lifeless_since = (job.lifeless_since if job.lifeless_since is not None and current is None else now)",
        ),
    ),
    _fleet(
        "spent-handed-out",
        "spent allocation handed out again",
        ("current.id in entry.spent and entry.runner is None", "False"),
    ),
    _fleet("id-twice-after-retention", "id issued twice after retention", ("if found.issued:", "if False:")),
    _fleet(
        "stop-dropped-unanswered",
        "stop intent dropped before its answer",
        (
            "if stop.answered is None or listing.jobs_index < stop.answered:",
            "if listing.jobs_index < (stop.answered or 0):",
        ),
    ),
    _fleet(
        "stop-dropped-by-older-listing",
        "stop intent dropped before its proof",
        ("if stop.answered is None or listing.jobs_index < stop.answered:", "if stop.answered is None:"),
    ),
    _fleet(
        "strangers-ends-create",
        "strangers' ended allocations creating jobs",
        (" or not rules.lives(new):\n", ":\n"),
    ),
    _fleet(
        "strangers-dead-jobs-create",
        "strangers' dead jobs creating jobs",
        (" or new.status is JobStatus.DEAD:\n", ":\n"),
    ),
    _roster(
        "mark-for-a-stopped-job",
        "mark written for a stopped job",
        ("if entry is None or entry.runner is None or entry.job.stop is not None:", "if entry is None:"),
        (
            "return entry.runner.phase is Phase.USED\n",
            "return entry.runner is not None and entry.runner.phase is Phase.USED\n",
        ),
    ),
    _fleet(
        "fleet-stops-surplus",
        "surplus stopped by the fleet",
        (
            "                self._issue(entry, current, now, named_after_job=entry.job.ours)\n",
            "                self._issue(entry, current, now, named_after_job=entry.job.ours)\n"
            "                if len(self._idle[entry.job.environment]) > 3:\n"
            "                    return [*decisions, *self._stop(entry, Reason.SURPLUS, now)]\n",
        ),
    ),
    # Others that were made, or nearly
    _fleet(
        "claimed-twice",
        "a used runner claimed again",
        ("if runner is None or runner.phase is not Phase.IDLE:", "if runner is None:"),
    ),
    _fleet(
        "idle-ends-executions",
        "EndExecutions for idle runners",
        ("if runner.phase is Phase.USED else []", "if runner else []"),
    ),
    _fleet(
        "job-id-twice",
        "every runner of our job gets the job's id",
        ("first = named_after_job and not job.id_issued", "first = named_after_job"),
    ),
    _roster(
        "spent-forgotten",
        "spent allocations forgotten at a restart",
        ("if runner.claimed_at is not None:", "if False:"),
    ),
    _fleet(
        "stop-not-resumed",
        "an unanswered stop forgotten at a restart",
        (
            "                decisions.append(StopJob(entry.job.id))\n            elif",
            "                pass\n            elif",
        ),
    ),
    _fleet(
        "still-there-is-fine",
        "a job still there after its stop",
        (
            "        if present:\n            self._update(entry, replace(entry.job, stop=Intent(now)))\n            return [StopJob(entry.job.id)]\n",
            "        if present:\n            return []\n",
        ),
    ),
    _rules(
        "gone-job-lives",
        "allocations of a removed job still meant to run",
        ("if lives(allocation) and allocation.created > job.gone_version and", "if lives(allocation) and"),
    ),
    _fleet(
        "old-news-of-jobs",
        "old news of unknown jobs believed",
        ("if _is_old_news(new.version, self._position.jobs_index, as_of) or", "if"),
    ),
    _fleet(
        "old-news-of-allocations",
        "old news of unknown allocations believed",
        (
            "            if _is_old_news(new.version, self._listed_up_to(entry), as_of):\n                return None\n",
            "            pass\n",
        ),
    ),
    _fleet(
        "one-old-listing-resets",
        "one late listing taken for a cluster that went back",
        ("if self._went_back >= 2:", "if self._went_back >= 1:"),
    ),
    _fleet(
        "never-back",
        "a cluster that went back isn't noticed",
        ("if self._went_back >= 2:", "if self._went_back >= 99:"),
    ),
    _fleet(
        "back-unnoticed-when-empty",
        "a cluster that went back isn't noticed by an empty fleet",
        ("max(self._highest_job, position.jobs_index)", "self._highest_job"),
        ("max(self._highest_allocation, position.allocations_index)", "self._highest_allocation"),
    ),
    _fleet(
        "removal-resets",
        "the removal of an unknown job taken for a table's version",
        (
            "        self._update(entry, replace(entry.job, gone_version=gone.version))",
            "        self._highest_job = max(self._highest_job, gone.version)\n        self._update(entry, replace(entry.job, gone_version=gone.version))",
        ),
    ),
    _fleet(
        "orphans-create",
        "the allocation of a job that a listing lacks creating a job",
        ("if allocation.job in self._entries or allocation.created > listing.jobs_index:", "if allocation:"),
    ),
    _fleet(
        "mark-under-way-lost-going-back",
        "a mark under way not repeated when the cluster went back",
        (
            "        entry.mark_asked = None\n        self._update(entry, replace(job, version=0",
            "        self._update(entry, replace(job, version=0",
        ),
    ),
    _fleet(
        "stop-lost-going-back",
        "an answered stop not repeated when the cluster went back",
        ("return [StopJob(job.id)] if answered else []", "return []"),
    ),
    _fleet(
        "mark-lost-going-back",
        "a mark not repeated when the cluster went back",
        ("if job.mark is not None and entry.spent else", "if False else"),
    ),
    _fleet(
        "unanswered-mark-stays",
        "a mark that may have been written not taken back",
        ("if asked is not None and wanted != asked and (asked or wanted):", "if False:"),
    ),
    _fleet("marks-repeat", "the same mark decided again and again", ("if entry.mark_asked == wanted:", "if False:")),
    _rules("vanished-next-awaited", "a next allocation that is gone waited for", (" and newest.version > listed", "")),
    _rules(
        "untold-forgets",
        "what a listing doesn't tell overwrites what is known",
        (
            "    if known is None:\n        return new\n    return",
            "    if known is None or new:\n        return new\n    return",
        ),
    ),
    _rules(
        "follow-up-ignored",
        "a failed job that will be rescheduled doubted",
        ("(newest.migrate or newest.follow_up not in (UNTOLD, None))", "newest.migrate"),
    ),
    _rules(
        "oldest-is-current",
        "the oldest allocation taken for the current one",
        ("return max(meant, key=_age, default=None)", "return min(meant, key=_age, default=None)"),
    ),
    _fleet("guess-wins", "that a started job is pending believed for good", ("return guessed and", "return False and")),
    _fleet(
        "dead-wins",
        "a job recorded dead and alive at one version is dead",
        ("return new.status is not JobStatus.DEAD\n", "return False\n"),
    ),
    _roster(
        "ended-leaves-allocations",
        "a job that comes back brings old allocations",
        ("            self._journal.absent(allocation)  # should", "            pass  # should"),
    ),
    _fleet(
        "look-up-once-more",
        "a stranger's job looked up with every event",
        (
            "            entry.look_up_asked = True\n            decisions.append(LookUp(entry.job.id, now))\n        decisions += self._note_time",
            "            decisions.append(LookUp(entry.job.id, now))\n        decisions += self._note_time",
        ),
    ),
    _fleet(
        "unadopted-handed-out",
        "a stranger's life handed out before its look-up",
        ("if entry.job.stop is None and entry.job.adopted:", "if entry.job.stop is None:"),
    ),
    _roster(
        "stopped-starts",
        "an unanswered start of a stopped job repeated",
        ("if entry.job.stop is None and rules.awaits_start(entry.job)", "if rules.awaits_start(entry.job)"),
    ),
    _pool(
        "used-count",
        "used runners counted as idle",
        ("            used += 1\n", "            used += 1\n            idle.append((runner.ready_at, job.id))\n"),
    ),
    _pool(
        "starting-not-counted",
        "starting jobs not counted",
        (" - len(pool.idle) - len(pool.starting)", " - len(pool.idle)"),
    ),
    _pool(
        "oldest-surplus",
        "the oldest surplus runners stopped",
        ("*reversed(pool.starting), *reversed(pool.idle)", "*pool.starting, *pool.idle"),
    ),
    _pool("back-off-overflows", "a day of failures overflows", ("min(self.failures, 10)", "self.failures")),
    # Recognition
    _strange(
        "forgotten-and-expected",
        "a job whose end was told must be there",
        ("return job.version > job.gone_version and not stopped", "return job.version > 0 and not stopped"),
    ),
    _strange(
        "stopped-and-expected",
        "an unanswered stop proves an end",
        ("stopped = job.stop is not None and job.stop.answered is not None", "stopped = job.stop is not None"),
    ),
    _strange(
        "only-jobs-recognised",
        "an allocation of ours isn't recognised",
        ("or any(self._knows(allocation) for", "or any(False for"),
    ),
    _strange(
        "newer-and-expected",
        "a job must be in a listing that was asked for before it",
        ("and (known is None or entry.job.version <= known)", ""),
    ),
    _strange("anything-recognised", "another cluster is believed", ("or not self.expected(known)", "or True")),
)

MARKS = "marks are our own; a cluster tells of none but those that we wrote"
ONE_CLUSTER = "each recording is of one cluster"
UNRECORDED = {
    "forgotten-and-expected": ONE_CLUSTER,
    "stopped-and-expected": ONE_CLUSTER,
    "only-jobs-recognised": ONE_CLUSTER,
    "newer-and-expected": ONE_CLUSTER,
    "anything-recognised": ONE_CLUSTER,
    "back-unnoticed-when-empty": "nothing of an empty fleet is in a recording",
    "removal-resets": "no stranger's purge lies above all lists of a recording",
    "mark-under-way-lost-going-back": MARKS,
    "mark-lost-going-back": MARKS,
    "unanswered-mark-stays": MARKS,
    "marks-repeat": MARKS,
    "vanished-next-awaited": "no recorded cluster has forgotten what it had announced",
    "untold-forgets": "only lists leave something out; tests/nomad/test_recordings.py makes them",
    "follow-up-ignored": "in each recording the job is pending, too",
    "oldest-is-current": "no recorded cluster has ever meant two allocations of one slot to run",
    "guess-wins": "a doubt follows only if the job's second event is lost too",
    "ended-leaves-allocations": "only a store remembers them",
    "stopped-starts": "the repetition of starts is the shell's",
    "used-count": "pools aren't told by executors",
    "starting-not-counted": "pools aren't told by executors",
    "oldest-surplus": "pools aren't told by executors",
    "back-off-overflows": "pools aren't told by executors",
}
"""Faults that no recording can show, and why; the other tests of the core catch them."""
