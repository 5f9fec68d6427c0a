#!/usr/bin/env python3
"""Drives the control plane's page in headless Chromium, over its debugging protocol, against a stand-in for a control
plane. Exits with 1 at the first thing that is not as expected. Pictures go to the folder given as argument.
"""

import base64
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

import mock
import websocket

WAIT_SECONDS = 60
KEYS = {"Escape": 27, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page in a Chromium of its own."""

    def __init__(self, binary: str, profile: str):
        # Chromium refuses its sandbox for root, as in most containers of a CI.
        options = ["--no-sandbox"] if os.getuid() == 0 else []
        command = [binary, "--headless=new", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}", *options, "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        port = None
        for line in self.process.stderr:
            if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                port = found.group(1)
                break
        if port is None:
            sys.exit("error: chromium ended before it listened")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=WAIT_SECONDS) as response:
            pages = json.load(response)
        url = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self.socket = websocket.create_connection(url, timeout=WAIT_SECONDS, suppress_origin=True)
        self.numbers = itertools.count(1)
        self.messages: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: object) -> dict:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    sys.exit(f"error: {method}: {message['error']}")
                return message["result"]
            self.note(message)

    def note(self, message: dict) -> None:
        """Keeps what a developer would see in the console: errors, refused files, violations of the policy."""
        params = message.get("params", {})
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.messages.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))

    def evaluate(self, expression: str) -> object:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            sys.exit(f"error: {expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                sys.exit(f"error: not true after {WAIT_SECONDS} s: {expression}; console: {self.messages}")
            time.sleep(0.1)

    def open(self, port: int) -> None:
        """Opens the page of a control plane. What the last page has said, whose control plane is gone, is dropped."""
        self.send("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.messages.clear()
        self.send("Page.navigate", url=f"http://127.0.0.1:{port}/")
        self.until("location.href !== 'about:blank'")

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=KEYS[name])

    def shape(self, width: int, height: int, dark: bool) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: pathlib.Path) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        # An orderly end, so that no process of Chromium still writes to the profile.
        self.socket.send(json.dumps({"id": next(self.numbers), "method": "Browser.close"}))
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()


def expect(is_right: object, text: str) -> None:
    if not is_right:
        sys.exit(f"error: {text}")


def small_fleet(browser: Browser, out: pathlib.Path) -> None:
    fleet = mock.Fleet(1, num_members=4, num_layers=8, num_experts=32)
    fleet.token = "correct horse"
    server = mock.serve(fleet)
    browser.shape(1300, 1500, dark=False)
    browser.open(server.server_port)
    # A wrong token is asked for again, the right one is kept by the tab.
    for token in ("wrong", fleet.token):
        browser.until("document.getElementById('token-dialog')?.open")
        browser.evaluate(f"document.getElementById('token').value = {json.dumps(token)}; document.querySelector('#token-form button').click()")
    browser.until("document.querySelectorAll('#member-rows tr').length === 4")
    refused = [text for text in browser.messages if "401" not in text]
    expect(not refused, f"console: {refused}")
    text = browser.evaluate("document.body.innerText")
    for expected in ("degraded", "deepseek_v3", f"{mock.HOSTILE} holds 5 experts", mock.HOSTILE, "137 of 140", "unreachable: connection refused", "INSECURE: plain text", "INSECURE: server-0: plain text to other hosts", "not used: verbs: no device", "server-1 is draining", f"{mock.HOSTILE} from 10.0.0.9", "forbidden: that needs the role operator"):
        expect(expected in text, f"the page lacks {expected!r}")
    expect(browser.evaluate("document.getElementById('models').hidden"), "a fleet with one model shows an update")
    cells = "[...document.querySelectorAll('#member-rows tr')].map((row) => [...row.children].slice(6, 9).map((cell) => cell.textContent).join(' '))"
    # Names sort by number: the hostile one, which reports no phases, comes first.
    expect(browser.evaluate(cells)[:2] == ["– – –", "37 µs 1.4 ms 9.4 µs"], f"phases: {browser.evaluate(cells)}")
    charted = "document.querySelector('#chart-phases .u-legend')?.innerText ?? ''"
    browser.until(f"({charted}).includes('combine')")
    boxes = "[...document.querySelectorAll('.chart .u-legend')].map((legend) => legend.closest('.chart').getBoundingClientRect().bottom - legend.getBoundingClientRect().bottom)"
    expect(min(browser.evaluate(boxes)) >= 0, f"legends end outside of their charts: {browser.evaluate(boxes)}")
    raw = browser.evaluate("document.documentElement.textContent")
    expect("\\u202e)nepo( dekcah\\u2066" in raw and "\u202e" not in raw, "a member turns the direction of text around")
    expect(browser.evaluate("document.title") != "owned", "a member's name ran as HTML")
    expect(browser.evaluate("document.querySelectorAll('main img').length") == 0, "a member's name became an image")

    health(browser, fleet)

    # The keyboard reaches every cell of the map.
    browser.evaluate("document.getElementById('heat').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowDown")
    readout = browser.evaluate("document.getElementById('heat-cell').textContent")
    expect(readout.startswith("Expert 0, layer 4: ") and "Replicas: server-" in readout, f"the mark says {readout!r}")
    browser.evaluate("const box = document.getElementById('layer'); box.value = '5'; box.dispatchEvent(new Event('change'))")
    browser.key("ArrowUp")
    readout = browser.evaluate("document.getElementById('heat-cell').textContent")
    expect(readout.startswith(f"Expert 0, {mock.HOSTILE}: "), f"the mark says {readout!r}")

    # A drain asks first; escape and cancel do nothing.
    drain = "document.querySelector('button[aria-label=\"Drain server-0\"]').click()"
    browser.evaluate(drain)
    browser.until("document.getElementById('confirm').open")
    browser.key("Escape")
    browser.until("!document.getElementById('confirm').open")
    expect(fleet.changes == [], f"a cancelled drain was sent: {fleet.changes}")
    browser.evaluate(drain)
    browser.until("document.getElementById('confirm').open")
    browser.evaluate("document.getElementById('confirm-yes').click()")
    browser.until("!document.getElementById('toast').hidden")
    expect(fleet.changes == [("POST", f"/v1/members/{0:032x}/drain", {})], f"sent: {fleet.changes}")

    keyboard(browser)
    goals(browser, fleet)

    # A filter.
    browser.evaluate("const filter = document.getElementById('filter'); filter.value = 'draining'; filter.dispatchEvent(new Event('input'))")
    browser.until("document.querySelectorAll('#member-rows tr').length === 1")
    browser.evaluate("filter.value = ''; filter.dispatchEvent(new Event('input'))")
    browser.picture(out / "small.png")

    for dark in (False, True):
        browser.shape(390, 1500, dark)
        time.sleep(0.5)
        width = browser.evaluate("document.documentElement.scrollWidth")
        expect(width <= 390, f"the page is {width} pixels wide on a screen of 390")
        browser.picture(out / f"narrow-{'dark' if dark else 'light'}.png")

    # A viewer gets no buttons that change the fleet, also if the operator's role is taken away while the page is open.
    fleet.roles = ["viewer"]
    browser.until("document.getElementById('caller')?.textContent.includes('role operator')")
    buttons = "document.querySelectorAll('#member-rows button:not([hidden])').length"
    browser.until(f"document.querySelectorAll('#member-rows tr').length === 4 && {buttons} === 0")
    expect(browser.evaluate("document.querySelector('#goals-form button').disabled"), "a viewer may change the goals")

    refusals(browser, fleet)

    # A control plane that is gone.
    fleet.health, fleet.problems = "healthy", []
    browser.until("document.title === 'Switchyard'")
    server.shutdown()
    server.server_close()
    browser.until("document.getElementById('health').textContent === 'no contact'")
    expect(browser.evaluate("document.title") == "no contact · Switchyard", "the title of a page without contact says that all is well")
    expect(browser.evaluate("document.getElementById('fleet').classList.contains('stale')"), "old figures look as if they were new")


FOCUS = "(document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent)"
DRAIN = "document.querySelector('button[aria-label=\"Drain server-2\"]')"


def answers(browser: Browser, count: int) -> None:
    """Waits until the page has had `count` more answers."""
    browser.evaluate("window.seen = performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/v1/status')).length")
    browser.until(f"performance.getEntriesByType('resource').filter((entry) => entry.name.endsWith('/v1/status')).length >= window.seen + {count}")


def keyboard(browser: Browser) -> None:
    """New answers take neither the focus away nor the reader to another place, with and without a question."""
    browser.evaluate("performance.setResourceTimingBufferSize(100000)")
    browser.evaluate(f"{DRAIN}.focus(); window.scrollTo(0, 0)")
    answers(browser, 2)
    expect(browser.evaluate(FOCUS) == "Drain server-2", f"the focus went to {browser.evaluate(FOCUS)!r}")
    expect(browser.evaluate("scrollY") == 0, "the page scrolls by itself")
    browser.evaluate(f"{DRAIN}.click()")
    browser.until("document.getElementById('confirm').open")
    answers(browser, 2)
    browser.key("Escape")
    browser.until("!document.getElementById('confirm').open")
    expect(browser.evaluate(FOCUS) == "Drain server-2", f"after the question, the focus went to {browser.evaluate(FOCUS)!r}")


def goals(browser: Browser, fleet: mock.Fleet) -> None:
    """A change of one goal leaves the other one as another operator has set it."""
    field = "document.getElementById('goal-{}')"
    browser.evaluate(f"var spare = {field.format('spare')}; spare.value = '0.5'; spare.dispatchEvent(new Event('input'))")
    fleet.goals = {"replicas": 3, "spare": 0.1}
    browser.until("document.getElementById('goals-in-force').textContent.includes('3 replicas')")
    expect(browser.evaluate(f"{field.format('replicas')}.value") == "3", "the form shows goals that are not in force")
    expect(browser.evaluate("spare.value") == "0.5", "an answer overwrote what was typed")
    browser.evaluate("document.getElementById('goals-change').click()")
    browser.until("document.getElementById('confirm').open")
    question = browser.evaluate("document.getElementById('confirm-text').textContent")
    expect("10 %" in question and "50 %" in question, f"the question is {question!r}")
    browser.evaluate("document.getElementById('confirm-yes').click()")
    browser.until("document.getElementById('toast').textContent.includes('goals')")
    expect(fleet.changes[-1] == ("PUT", "/v1/goals", {"replicas": 3, "spare": 0.5}), f"sent: {fleet.changes}")


def refusals(browser: Browser, fleet: mock.Fleet) -> None:
    """A caller without the right reads so, and may show a token."""
    fleet.token = None
    browser.evaluate("document.getElementById('forget').click()")
    browser.until("document.querySelectorAll('#member-rows tr').length === 4")
    fleet.credential = "certificate"
    browser.evaluate("location.reload()")
    browser.until("document.getElementById('use-token')?.hidden === false")
    for status, word in ((429, "too many requests"), (503, "not ready"), (403, "no access")):
        fleet.refused = {"/v1/members": status}
        browser.until(f"document.getElementById('health').textContent === '{word}'")
        expect(browser.evaluate("document.getElementById('freshness').textContent").startswith("that needs another role"), "the reason is missing")
    browser.evaluate("document.getElementById('use-token').click()")
    browser.until("document.getElementById('token-dialog').open")
    fleet.refused = {}
    browser.evaluate("document.getElementById('token').value = 'another'; document.querySelector('#token-form button').click()")
    browser.until("document.getElementById('health').textContent === 'degraded' && !document.getElementById('forget').hidden")


def update(browser: Browser, out: pathlib.Path, num_members: int, num_layers: int, num_experts: int) -> None:
    """An update of the model: both editions with their members, progress and placements."""
    fleet = mock.Update(3, num_members, num_layers, num_experts)
    server = mock.serve(fleet)
    browser.shape(1300, 1700, dark=False)
    browser.open(server.server_port)
    browser.until(f"document.querySelectorAll('#member-rows tr').length === {min(num_members, 100)}")
    browser.until("document.querySelectorAll('#editions article').length === 2")
    cards = browser.evaluate("[...document.querySelectorAll('#editions article')].map((card) => card.innerText.replace(/\\s+/g, ' '))")
    total = num_layers * num_experts
    placed = num_layers // 2 * num_experts
    num_new = num_members - num_members // 2
    for card, words in zip(cards, (
        ("000000000000", "current", f"{total:,} of {total:,} experts", "clients 12"),
        ("111111111111", "next", f"{placed:,} of {total:,} experts", f"serving {num_new - 1}", "draining 1", "as soon as it is complete"),
    )):
        for word in words:
            expect(word in card, f"the card {card!r} lacks {word!r}")
    values = "[...document.querySelectorAll('#editions progress')].map((bar) => bar.value / bar.max)"
    expect(browser.evaluate(values) == [1, placed / total], f"progress: {browser.evaluate(values)}")

    # Members have their model, which the filter finds, too.
    titles = "[...document.querySelectorAll('#member-head button')].map((button) => button.innerText).join()"
    expect("Model" in browser.evaluate(titles), f"columns: {browser.evaluate(titles)}")
    browser.evaluate("var filter = document.getElementById('filter'); filter.value = '111111111111'; filter.dispatchEvent(new Event('input'))")
    browser.until(f"document.getElementById('member-count').textContent === '{num_new:,} of {num_members:,} members'")
    browser.evaluate("filter.value = ''; filter.dispatchEvent(new Event('input'))")

    # The map shows the chosen model, with the servers of that model only.
    mark = "document.getElementById('heat-cell').textContent"
    browser.evaluate("document.getElementById('heat').focus()")
    browser.key("ArrowRight")
    expect("Replicas: server-" in browser.evaluate(mark) and "new-" not in browser.evaluate(mark), f"the mark says {browser.evaluate(mark)!r}")
    browser.evaluate("var choice = document.getElementById('model-choice'); choice.selectedIndex = 1; choice.dispatchEvent(new Event('change'))")
    browser.until(f"{mark}.includes('Replicas: new-')")
    expect(browser.evaluate("choice.selectedIndex") == 1, "the choice of the model was lost")
    expect(not browser.messages, f"console: {browser.messages}")
    browser.picture(out / f"update-{num_members}.png")
    for dark in (False, True):
        browser.shape(390, 2200, dark)
        time.sleep(0.5)
        width = browser.evaluate("document.documentElement.scrollWidth")
        expect(width <= 390, f"during an update the page is {width} pixels wide on a screen of 390")
        browser.picture(out / f"update-{num_members}-narrow-{'dark' if dark else 'light'}.png")

    # After the update the page is as before.
    fleet.answer = lambda method, path, body: mock.Fleet.answer(fleet, method, path.split("?fingerprint")[0], body)
    for member in fleet.members:
        del member["fingerprint"]
    browser.until("document.getElementById('models').hidden && document.getElementById('shown-model').hidden")
    browser.until(f"!({titles}).includes('Model')")
    server.shutdown()
    server.server_close()


def health(browser: Browser, fleet: mock.Fleet) -> None:
    """The page shows the condition and the sentences of the control plane, and judges nothing by itself."""
    kept = fleet.health, fleet.problems
    sentences = [
        "3 of 4 planned servers are serving (0 loading, 1 draining, 0 expired)",
        "the token file /etc/switchyard/tokens, line 2: no hash; older tokens stay in force",
        "the control plane's TLS files cannot be used: no key",
    ]
    shown = "[document.getElementById('health').textContent, document.getElementById('health').className, document.title, ...[...document.querySelectorAll('#problems li')].map((line) => line.textContent)]"
    cases = [("degraded", "warn", [sentence]) for sentence in sentences]
    for word, badge, problems in [*cases, ("degraded", "warn", sentences), ("down", "bad", sentences[:1]), ("healthy", "good", [])]:
        fleet.health, fleet.problems = word, problems
        title = "Switchyard" if word == "healthy" else f"{word} · Switchyard"
        expected = [word, f"badge {badge}", title, *problems]
        browser.until(f"JSON.stringify({shown}) === JSON.stringify({json.dumps(expected)})")
    fleet.health, fleet.problems = kept


def large_fleet(browser: Browser, out: pathlib.Path) -> None:
    server = mock.serve(mock.Fleet(2, num_members=1000, num_layers=61, num_experts=256))
    browser.shape(1300, 1700, dark=True)
    browser.open(server.server_port)
    browser.until("document.querySelectorAll('#member-rows tr').length === 100")
    expect(not browser.messages, f"console: {browser.messages}")
    expect("page 1 of 10" in browser.evaluate("document.getElementById('pages').innerText"), "1,000 members have no ten pages")
    browser.picture(out / "large.png")

    # The keyboard turns pages, and the mark of the map stays in view.
    browser.evaluate("document.getElementById('page-next').focus()")
    for number in (2, 3):
        browser.evaluate("document.activeElement.click()")
        expect(browser.evaluate("document.getElementById('page-number').textContent") == f"page {number} of 10", "the page was not turned")
    browser.evaluate("window.scrollTo(0, 0)")
    answers(browser, 2)
    expect(browser.evaluate(FOCUS) == "Next" and browser.evaluate("scrollY") == 0, f"the focus went to {browser.evaluate(FOCUS)!r}")
    browser.evaluate("var layer = document.getElementById('layer'); layer.value = '5'; layer.dispatchEvent(new Event('change')); document.getElementById('heat').focus()")
    for _ in range(300):
        browser.evaluate("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}))")
    scrolled = browser.evaluate("document.getElementById('heat').parentElement.scrollTop")
    expect(scrolled > 300, f"the mark of the map left the view: the box is at {scrolled}")
    server.shutdown()
    server.server_close()


def main() -> None:
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        sys.exit("error: no chromium: install Debian's package `chromium`")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(binary, profile)
        try:
            small_fleet(browser, out)
            large_fleet(browser, out)
            update(browser, out, num_members=6, num_layers=8, num_experts=32)
            update(browser, out, num_members=1000, num_layers=61, num_experts=256)
        finally:
            browser.close()
    print(f"the page works with 4 and 1,000 members, and in an update; pictures are in {out}")


if __name__ == "__main__":
    main()
