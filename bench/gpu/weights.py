"""weights.py BINARY MODEL ROUNDS: seconds from exec to serving by the source of the weights, a line of JSON each.

MODEL is a complete checkpoint. Servers are on cuda:0, on cuda:$LAST_GPU (default 1) and on processors.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

binary, model, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
last = int(os.environ.get("LAST_GPU", "1"))
bare = tempfile.mkdtemp()
shutil.copy(os.path.join(model, "config.json"), bare)
url = "http://127.0.0.1:17411"
environment = {**os.environ, "SWITCHYARD_LOG": "info,switchyard_expert_server=debug,expert_server=debug"}


def start(*arguments, event):
    begin = time.time()
    errors = tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False)
    process = subprocess.Popen([binary, "--json", *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("event") == event:
            return process, round(time.time() - begin, 3), errors.name
    raise SystemExit(f"{arguments}: ended: {open(errors.name).read()[-1500:]}")


def stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def server(name, folder, source, device, port):
    arguments = ["expert-server", "--name", name, "--model", folder, "--listen", "127.0.0.1:0", "--control-plane", url]
    arguments += ["--weights-from", source, "--peer-read-limit", "100000000000", "--metrics-listen", f"127.0.0.1:{port}"]
    if device:
        arguments += ["--device", device, "--device-dtype", "fp8"]
    return start(*arguments, event="serving")


def metric(port, name):
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+]+)$", text, re.M)
    return sum(float(value) for value in found)


def show(case, number, seconds, port, log):
    text = re.sub(r"\x1b\[[0-9;]*m", "", open(log).read())
    read = re.findall(r"read weights of other servers.*?seconds=([0-9.]+)", text)
    opened = re.findall(r"opened the GPU.*?seconds=([0-9.]+)", text) or re.findall(r'opened the GPU.*?"seconds":([0-9.]+)', text)
    line = {"case": case, "round": number, "seconds": seconds}
    line["load_s"] = round(metric(port, "switchyard_server_load_seconds"), 3)
    line["device_bytes"] = metric(port, "switchyard_server_weights_device_bytes_total")
    line["read_bytes"] = metric(port, "switchyard_server_weights_read_bytes_total")
    line["read_s"], line["open_s"] = [round(float(s), 3) for s in read], [round(float(s), 3) for s in opened]
    print(json.dumps(line), flush=True)


def case(name, source, joins):
    control, _, _ = start("control-plane", "--listen", "127.0.0.1:17411", "--servers", "4", "--replicas", "4", event="listening")
    held, seconds, log = server("source", model, "disk", source, 17420)
    show(f"{name}: source", 0, seconds, 17420, log)
    for number in range(rounds):
        for label, device in joins:
            joined, seconds, log = server(f"join-{label}-{number}", bare, "peers", device, 17421)
            show(f"{name} to {label}", number, seconds, 17421, log)
            stop(joined)
    stop(held)
    stop(control)


case("gpu", f"cuda:{last}", [("gpu", "cuda:0"), ("cpu", None)])
case("cpu", None, [("gpu", "cuda:0")])
