"""Run a program, and a copy of it every 10 ms of its processor time, to which SIGTERM is sent.

`python -P copies.py FOLDER PROGRAM WORDS` forks the copies from the program where it then is, one
after the other, so that the program is begun once for all of them. FOLDER has what each copy said,
by its number, and `codes` a line for each: its exit code, negative for a signal.
"""

import os
import runpy
import signal
import sys

TICK_SECONDS = 0.008
"""The kernel counts processor time in steps of 4 or 10 ms."""


def main() -> None:
    """Entry point."""
    folder, program, *words = sys.argv[1:]
    sys.path.pop(0)
    own, codes = os.getpid(), list[int]()

    def copy(number: int, frame: object) -> None:
        pools = sys.modules.get("concurrent.futures.thread")
        if pools and pools._global_shutdown_lock.locked():
            return  # a fork takes this lock, and would wait for the code that it interrupts
        child = os.fork()
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            with open(f"{folder}/codes", "a", encoding="utf-8") as file:
                file.write(f"{codes[-1]}\n")
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        said = os.open(f"{folder}/{len(codes)}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        copied = os.getpid()
        # A process that a command forked ends in another way than the command itself.
        os.getpid = lambda: own
        os.kill(copied, signal.SIGTERM)

    signal.signal(signal.SIGPROF, copy)
    signal.setitimer(signal.ITIMER_PROF, TICK_SECONDS, TICK_SECONDS)
    sys.argv = [program, *words]
    try:
        runpy.run_path(program, run_name="__main__")
    finally:  # at its end Python holds locks that a copy would be without
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
