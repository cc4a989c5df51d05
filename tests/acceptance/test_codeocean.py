"""The ways in which CodeOcean uses the service, each to the result that its users shall see."""

from collections.abc import AsyncIterator
from functools import partial

import pytest
import trio

from tests.acceptance.codeocean import CodeOcean, Ran
from tests.acceptance.codeocean_socket import Socket
from tests.acceptance.sites import ROOT, Site

PATIENCE = 60
PROGRAM = {
    "exercise.sh": b'. lib/greet.sh\necho "Name?"\nread name\ngreet "$name"\necho oops >&2\n',
    "lib/greet.sh": b'greet() { echo "Hello $1"; }\n',
    "data/empty.txt": b"",
    "data/picture.bin": bytes(range(256)),
}


@pytest.fixture
async def learner(client: CodeOcean) -> AsyncIterator[CodeOcean]:
    """Who gives back what is left to the inactivity timeout else."""
    with trio.fail_after(PATIENCE):
        yield client
        for runner in client.runners.values():
            await client.release(runner)


def outcome(ran: Ran) -> tuple[str, int | None]:
    assert not ran.heard.dropped
    return ran.result, ran.code


async def answer_the_question(socket: Socket) -> None:
    await socket.said("Name?")
    await socket.type("Ada\n")


@pytest.mark.both
async def test_a_run_asks_and_is_answered_and_ends_with_its_exit_code_and_files(learner: CodeOcean) -> None:
    ran = await learner.run(1, PROGRAM, "bash exercise.sh", types=answer_the_question)
    assert outcome(ran) == ("exit", 0)
    assert ran.stdout == "Name?\r\nAda\r\nHello Ada\r\n"
    assert ran.stderr.strip() == "oops"
    assert {f"./{name}" for name in PROGRAM} <= set(ran.files)


@pytest.mark.both
async def test_a_second_run_takes_the_same_runner_and_finds_nothing_of_the_first(learner: CodeOcean) -> None:
    await learner.run(1, {"old.txt": b"old"}, "true")
    before = learner.runners[1]
    ran = await learner.run(1, {"new.txt": b"new"}, "ls; exit 3")
    assert (outcome(ran), ran.stdout) == (("exit", 3), "new.txt\r\n")
    assert learner.runners[1] == before


@pytest.mark.both
async def test_a_run_whose_runner_is_gone_gets_another_one(learner: CodeOcean) -> None:
    await learner.run(1, PROGRAM, "true")
    lost = learner.runners[1]
    await learner.release(lost)
    ran = await learner.run(1, PROGRAM, "ls lib")
    assert (outcome(ran), ran.stdout) == (("exit", 0), "greet.sh\r\n")
    assert learner.runners[1] != lost


@pytest.mark.both
async def test_a_run_that_takes_too_long_is_told_so_and_its_runner_deleted(learner: CodeOcean) -> None:
    ran = await learner.run(1, PROGRAM, "echo begin; sleep 60", limit=1)
    assert (outcome(ran), ran.stdout) == (("timeout", None), "begin\r\n")
    assert 1 not in learner.runners


@pytest.mark.both
async def test_an_exit_of_137_is_shown_as_out_of_memory(learner: CodeOcean) -> None:
    ran = await learner.run(1, PROGRAM, "kill -9 $$")
    assert outcome(ran) == ("out of memory", None)
    assert 1 in learner.runners


@pytest.mark.both
async def test_a_runner_that_is_destroyed_meanwhile_ends_the_run_as_depleted(learner: CodeOcean) -> None:
    async def destroy(socket: Socket) -> None:
        await socket.said("on")
        await learner.release(learner.runners[1])

    ran = await learner.run(1, PROGRAM, "echo on; sleep 60", types=destroy)
    assert outcome(ran) == ("container depleted", None)
    assert ran.heard.messages[-1]["type"] == "error"
    assert 1 not in learner.runners


@pytest.mark.both
async def test_a_user_who_stops_a_run_is_answered_at_once(learner: CodeOcean) -> None:
    async def stop(socket: Socket) -> None:
        await socket.said("on")
        await socket.stop()

    with trio.fail_after(20):  # else the client waits for 30 s
        ran = await learner.run(1, PROGRAM, "trap '' QUIT; echo on; sleep 60", types=stop, limit=60)
    assert outcome(ran) == ("container depleted", None)
    assert ran.heard.code == 1000


@pytest.mark.both
async def test_what_is_typed_together_with_the_handshake_is_not_lost(learner: CodeOcean) -> None:
    async def type_at_once(socket: Socket) -> None:
        await socket.type('{"cmd":"result","data":"Änna"}\n')
        await socket.type("as text\n", binary=False)

    ran = await learner.run(1, {}, 'sleep 0.2; read -r a; read -r b; echo "$b, $a"', types=type_at_once)
    assert outcome(ran) == ("exit", 0)
    assert ran.stdout.endswith('as text, {"cmd":"result","data":"Änna"}\r\n')


@pytest.mark.both
async def test_any_command_line_is_run_as_it_was_typed(learner: CodeOcean) -> None:
    command = "echo 'it''s' \"$HOME\" | wc -l && printf '%s|' a\\ b 'ü\n' \\\n  \"`echo c`\"\nfalse || exit 4"
    ran = await learner.run(1, {}, command)
    assert (outcome(ran), ran.stdout) == (("exit", 4), "1\r\na b|ü\r\n|c|")


@pytest.mark.both
async def test_a_score_runs_all_tests_in_one_runner(learner: CodeOcean) -> None:
    files = {f"test_{n}.sh": f"exit {n}\n".encode() for n in range(3)}
    results = await learner.score(1, files, [f"bash test_{n}.sh" for n in range(3)])
    assert [outcome(each) for each in results] == [("exit", 0), ("exit", 1), ("exit", 2)]
    assert len({*learner.runners.values()}) == 1


@pytest.mark.both
async def test_a_score_goes_on_in_another_runner_after_a_timeout(learner: CodeOcean) -> None:
    files = {"a.sh": b"exit 5\n"}
    results = await learner.score(1, files, ["bash a.sh", "sleep 60", "bash a.sh"], limit=1)
    assert [outcome(each) for each in results] == [("exit", 5), ("timeout", None), ("exit", 5)]


@pytest.mark.both
async def test_a_test_whose_runner_is_gone_is_run_in_another_one(learner: CodeOcean) -> None:
    learner.runners[1] = await learner.claim(1)
    await learner.release(learner.runners[1])
    assert outcome(await learner.command(1, "exit 6")) == ("exit", 6)


@pytest.mark.both
async def test_an_administrators_shell_runs_several_commands_at_once(learner: CodeOcean) -> None:
    await learner.command(1, "true")
    results: dict[int, Ran] = {}

    async def command(number: int) -> None:
        results[number] = await learner.command(1, f"for i in 1 2 3; do echo {number}; done; exit {number}")

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(command, number)
        nursery.start_soon(partial(learner.listing, learner.runners[1], "/", recursive=False))
    for number, ran in results.items():
        assert (outcome(ran), ran.stdout) == (("exit", number), f"{number}\r\n" * 3)


@pytest.mark.both
async def test_an_administrators_shell_lists_folders_and_fetches_files(learner: CodeOcean) -> None:
    learner.runners[1] = runner = await learner.claim(1)
    await learner.copy(runner, PROGRAM)
    [here] = (await learner.command(1, "pwd")).stdout.split()
    if not ROOT:
        pytest.skip("without root nothing is privileged")
    root = {entry["name"]: entry for entry in await learner.listing(runner, "/", recursive=False, privileged=True)}
    assert {"tmp", "usr"} <= set(root)
    assert root["tmp"]["entryType"] == "d"
    listed = await learner.listing(runner, f"{here}/data", recursive=False, privileged=True)
    assert sorted(entry["name"].rpartition("/")[2] for entry in listed) == ["empty.txt", "picture.bin"]
    content, _ = await learner.download(runner, f"{here}/data/picture.bin", privileged=True)
    assert content == PROGRAM["data/picture.bin"]


@pytest.mark.both
async def test_synchronising_leaves_exactly_what_is_known(site: Site, learner: CodeOcean, number: int) -> None:
    await learner.put(number, size=0)
    static = [each["id"] for each in await learner.environments() if each["id"] != number]
    await learner.synchronise(static)
    assert sorted(each["id"] for each in await learner.environments()) == sorted(static)
    await learner.synchronise(static)
    assert outcome(await learner.run(1, {}, "true")) == ("exit", 0)


@pytest.mark.both
async def test_an_image_is_checked_and_nothing_is_on_stderr(learner: CodeOcean, number: int) -> None:
    assert await learner.check_image(number)
    await learner.release(learner.runners.pop(number))
    await learner.remove(number)


@pytest.mark.both
async def test_many_learners_at_once_get_what_is_theirs(learner: CodeOcean) -> None:
    async def learn(number: int) -> None:
        one = CodeOcean(learner.url, learner.token, learner.http)
        ran = await one.run(1, {"main.sh": b"read x; echo $x " + str(number).encode()}, "bash main.sh", types=typed)
        assert ran.stdout.endswith(f"hello {number}\r\n")
        await one.release(one.runners[1])

    async def typed(socket: Socket) -> None:
        await socket.type("hello\n")

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(learn, number)
            nursery.start_soon(learner.statistics)
            nursery.start_soon(learner.health)
