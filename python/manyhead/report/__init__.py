"""The HTML pages of `manyhead profile --html` and `manyhead compare --html`."""
