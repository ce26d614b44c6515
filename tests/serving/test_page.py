"""The page in a real browser."""

import pytest

from tests.serving.browser import BROWSER, Browser
from tests.serving.conftest import serve

pytest.importorskip("starlette")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path)
    yield browser
    browser.close()


def test_the_page_continues_text_and_tells_tokens(browser, running):
    browser.size(390, 844)
    browser("Page.navigate", url=f"http://localhost:{running.port}/")
    browser.wait("document.title === 'tiny'")
    browser.value("$('prompt').value = 'a état'; $('max_tokens').value = 20; $('seed').value = 5; $('run').click()")
    browser.wait("!running && tokens.length > 10")
    text = running.complete("a état", max_tokens=20, seed=5, echo=True)["choices"][0]["text"]
    assert browser.value("$('output').textContent") == text
    browser.value("$('colour').value = '0'; paint(); choose(3)")
    experts = browser.value("tokens.filter(token => token.experts).length")
    assert experts == browser.value("tokens.length") - 1
    assert len(browser.value("$('detail').innerText").splitlines()) >= 8
    assert browser.value("new Set([...$('output').children].map(s => s.style.background)).size") > 1
    assert browser.value("document.documentElement.scrollWidth") == 390
    assert browser.errors == []


def test_an_invalid_number_is_named_in_closed_options(browser, running):
    browser.size(390, 844)
    browser("Page.navigate", url=f"http://localhost:{running.port}/")
    browser.wait("document.title === 'tiny'")
    browser.value("$('top_p').value = 7; document.querySelector('details').open = false; $('run').click()")
    assert browser.value("document.querySelector('details').open && document.activeElement.id") == "top_p"
    assert browser.value("$('status').textContent").startswith("Top-p: ")
    browser.value("$('top_p').value = 0.9; $('max_tokens').value = 3; $('run').click()")
    browser.wait("!running && tokens.length > 1")
    assert browser.value("$('status').textContent").endswith("the number of new tokens is reached")


def test_reload_keeps_the_text_but_not_the_key(browser, running):
    address = f"http://localhost:{running.port}/"
    browser("Page.navigate", url=address)
    browser.wait("document.title === 'tiny'")
    typed = "$(id).value = text; $(id).dispatchEvent(new Event('input'))"
    browser.value(f"for (const [id, text] of [['prompt', 'my text'], ['seed', '7'], ['key', 'secret']]) {{ {typed} }}")
    browser("Page.reload")
    browser.wait("document.title === 'tiny' && $('prompt').value === 'my text'")
    assert browser.value("[$('seed').value, $('key').value]") == ["7", ""]


def test_the_end_of_the_server_is_told(browser, generator):
    with serve(generator) as server:
        browser("Page.navigate", url=f"http://localhost:{server.port}/")
        browser.wait("document.title === 'tiny'")
    browser.value("$('run').click()")
    browser.wait("!running && $('status').className === 'wrong'")
    assert browser.value("$('status').textContent").startswith("The server has ended: start blackmamba chat again")
    assert not browser.value("$('run').disabled")
