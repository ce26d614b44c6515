"""The page in a real browser."""

import pytest

from tests.serving.browser import BROWSER, Browser

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
