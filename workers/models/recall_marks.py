"""Marks: tokens of recall that continue and end JSON where there is nothing to repeat.

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

Marks that begin or end something are likelier than marks that continue it, so that the most likely answer ends. Among
equals, the first is chosen.
"""
