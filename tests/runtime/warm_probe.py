"""Scripts for the tests of `fork_script`: one fails, one tells of its environment, one leaves a child behind."""

import fcntl
import json
import os
import sys
import time


def main(what: str, *words: str) -> None:
    answer = None
    if what == "fail":
        print("what went wrong", file=sys.stderr)
        sys.exit(3)
    elif what == "environment":
        answer = os.environ.get("OF_THIS_TEST")
    elif what == "stray":
        file = open(words[0])  # noqa: SIM115 - the child keeps it open, and with it the lock
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fork() == 0:
            time.sleep(1000)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
