"""The way out of a raw terminal whose program doesn't listen: Enter, `~`, `.` (as in ssh). Pure."""

from dataclasses import dataclass

ENTER = b"\r\n"
TILDE = b"~"
QUIT = b"."


@dataclass(slots=True)
class Escape:
    """Looks for the escape in what is typed. `~~` at the start of a line sends one `~`."""

    line_start: bool = True
    held: bool = False
    """A `~` at the start of a line waits for what comes next."""
    quit: bool = False

    def feed(self, typed: bytes) -> bytes:
        """What of *typed* is meant for the program."""
        passed = bytearray()
        for number in typed:
            passed += self._next(bytes([number]))
            if self.quit:
                break
        return bytes(passed)

    def _next(self, key: bytes) -> bytes:
        if self.held:
            self.held, self.line_start = False, False
            return self._escaped(key)
        if self.line_start and key == TILDE:
            self.held = True
            return b""
        self.line_start = key in ENTER
        return key

    def _escaped(self, key: bytes) -> bytes:
        if key == QUIT:
            self.quit = True
            return b""
        self.line_start = key in ENTER
        return key if key == TILDE else TILDE + key
