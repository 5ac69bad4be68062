import time, threading, httpx, asyncio, pytest
def dump(server):
    import sys, traceback
    for t in threading.enumerate(): print(t.name)
    async def tasks(): return [repr(t)[:600] for t in asyncio.all_tasks()]
    try:
        for t in asyncio.run_coroutine_threadsafe(tasks(), server._loop).result(3): print(t)
    except BaseException as e: print("loop stuck", repr(e))
    f=sys._current_frames().get(server.thread.ident)
    if f: traceback.print_stack(f)
from playwright.sync_api import sync_playwright
@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as d:
        b=d.chromium.launch(executable_path="/usr/bin/chromium",args=["--no-sandbox","--disable-gpu"]); yield b; b.close()
@pytest.mark.parametrize("i", range(8))
def test_it(start_stub, browser, i):
    server=start_stub(watchdog_s=1.0)
    c=browser.new_context(); page=c.new_page(); page.goto(server.url); page.wait_for_selector('#engine-dot[data-state="ready"]')
    page.fill("#prompt","!hang"); page.press("#prompt","Enter"); page.wait_for_selector('#engine-dot[data-state="stuck"]'); c.close()
    t=time.time()
    from jaxllm.server.board import Phase
    server.board.phase=Phase.STOPPING
    server.thread.join(8); print("joined", time.time()-t, server.thread.is_alive())
    if server.thread.is_alive():
        dump(server); import psutil; print([x for x in psutil.Process().net_connections() if x.laddr.port==int(server.url.split(":")[-1])])
        pytest.exit("x")
