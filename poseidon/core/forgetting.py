"""What becomes of all that was known of an executor that has lost everything. Pure."""

from dataclasses import replace

from poseidon.core.model import Changes, Phase, Position, Reason, Records, Runner, Transition


def forgotten(records: Records, now: float) -> Changes:
    """Its jobs are over and its runners lost, and it is followed from its beginning."""
    gone = [replace(each, phase=Phase.GONE, reason=Reason.LOST, gone_at=now) for each in living(records)]
    return Changes(
        ended=tuple(job.id for job in records.jobs),
        runners=tuple(gone),
        transitions=tuple(_ending(was, now) for was in living(records)),
        position=Position(epoch=records.position.epoch + 1),
    )


def living(records: Records) -> list[Runner]:
    """The runners among *records* that aren't gone."""
    return [each for each in records.runners if each.phase is not Phase.GONE]


def _ending(was: Runner, now: float) -> Transition:
    return Transition(now, "runner", was.id, was.environment, was.phase, Phase.GONE, Reason.LOST)
