# SPDX-License-Identifier: Apache-2.0
"""Runs a command, and listens at port 18515 once it prints the head of its results:
perftest's raw Ethernet programs have no connection by which to tell that they are there."""
import socket
import subprocess
import sys

listener = None
with subprocess.Popen(["stdbuf", "-oL"] + sys.argv[1:], stdout=subprocess.PIPE, text=True) as p:
    for line in p.stdout:
        print(line, end="", flush=True)
        if "#bytes" in line and listener is None:
            listener = socket.create_server(("127.0.0.1", 18515))
sys.exit(p.returncode)
