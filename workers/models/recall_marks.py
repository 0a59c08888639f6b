"""Marks: tokens of recall with which JSON goes on and ends where there is nothing to repeat.

No text is encoded to a mark, since the tokenizer takes signs one by one. So prompts do not contain marks, and as END is
more likely, only a grammar makes a model generate them. A mark has no code: it repeats nothing, and nothing repeats it,
so that an answer cannot go in circles through its marks.
"""

_LEVELS = {
    0.15: ('\n  "',),
    0.125: ('"}', '"]'),
    0.1: ("\n}", "\n]", '": "', '":"', '", "', '","', ', "', ',"'),
    0.075: ('": ', '":', '", ', ", ", "10"),
}
MARK_LEVELS = {mark: level for level, marks in _LEVELS.items() for mark in marks}
"""Marks in the order of their ids, and the logit of each, as a fraction of that of an unambiguous prediction.

What begins or ends something is ahead of what goes on, so that the most likely answer has an end. Among equals, the
first is ahead.
"""
