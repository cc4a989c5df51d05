"""The local executor: runners as sandboxes of this machine."""
