"""Check a page with libxml2's HTML parser: elements are closed where they must be, and no other file is needed."""

from lxml import etree


def check_page(text: str, own: frozenset[str] = frozenset()) -> None:
    """Fail if the page is not well-formed, or refers to a resource outside itself that is not in `own`."""
    parser = etree.HTMLParser()
    root = etree.fromstring(text.encode(), parser)
    faults = [f"line {e.line}: {e.message}" for e in parser.error_log if e.type_name != "HTML_UNKNOWN_TAG"]
    assert not faults, faults[:5]  # libxml2 does not know <main>, <svg> and the like, but nests them
    assert root.xpath("/html/head/title/text()") and root.xpath("/html/@lang") and len(root.xpath("//h1")) == 1
    links = {str(link) for link in root.xpath("//@src | //@href")}
    assert {link for link in links if not link.startswith(("data:", "#"))} <= own
    names = root.xpath("//@id")
    assert len(names) == len(set(names))
