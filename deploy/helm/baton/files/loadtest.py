"""The Job of the load test: runs the command that its arguments after the first are, then pauses, so that the report can be copied. The
first argument is the pause, seconds. The API key comes from its file. SIGTERM ends both; the comparison takes its time, in which it gives
the release back the sizes that it found."""

import os
import signal
import subprocess
import sys
from pathlib import Path

pause, command = float(sys.argv[1]), sys.argv[2:]
key = Path("/etc/baton/keys/test-key")
if key.parent.exists() and not key.exists():
    sys.exit(
        "the Secret security.apiKeysSecret has no `test-key`: put one of the API keys there, with admin=yes unless there are certificates"
    )
shown = {"BATON_API_KEY": key.read_text().strip()} if key.exists() else {}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD])
running = subprocess.Popen(command, env={**os.environ, **shown}, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []))
while running.poll() is None:
    if (told := signal.sigtimedwait([signal.SIGTERM, signal.SIGINT, signal.SIGCHLD], 1.0)) and told.si_signo != signal.SIGCHLD:
        running.send_signal(told.si_signo)
        pause = 0.0
if pause:
    pod, space = os.environ["POD"], os.environ["NAMESPACE"]
    print(f"for {pause:g} s: kubectl -n {space} cp {pod}:/report report", flush=True)
    signal.sigtimedwait([signal.SIGTERM, signal.SIGINT], pause)
sys.exit(running.returncode)
