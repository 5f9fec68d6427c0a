"""serve_time.py BINARY DIR DEVICE ROUNDS: seconds from exec to serving, a line of JSON per round."""

import json
import os
import signal
import subprocess
import sys
import time

binary, model, device, rounds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
for number in range(rounds):
    start = time.time()
    command = [binary, "--json", "expert-server", "--model", model, "--name", f"l{number}", "--experts", "all"]
    command += ["--listen", "127.0.0.1:0", "--device", device, "--device-dtype", "fp8"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seconds = None
    for line in server.stdout:
        if line.startswith("{") and json.loads(line).get("event") == "serving":
            seconds = round(time.time() - start, 3)
            break
    server.send_signal(signal.SIGTERM)
    try:
        errors = server.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        server.kill()
        errors = server.communicate()[1]
    result = {"binary": os.path.basename(binary), "seconds": seconds, "exit": server.returncode}
    print(json.dumps(result if seconds else {**result, "errors": errors[-600:]}), flush=True)
