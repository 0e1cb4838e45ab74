"""Prompts on which formats are measured.

They are no part of the text that weights are calibrated on (`weights/calibration.txt`).
"""

PROSE = """\
The ferry to Stromness leaves at half past six. By then the fog has usually lifted, but this morning it lay so low on \
the water that the captain sounded his horn every two minutes, and the gulls answered. Mrs Flett, who had brought eggs \
for her sister, counted the steps down to the car deck: fourteen, as always. Nobody else was up."""
CODE = """\
class Inventory:
    def __init__(self, capacity=100):
        self.items = {}
        self.capacity = capacity

    def add(self, name, quantity):
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        self.items[name] = self.items.get(name, 0) + quantity
        return sum(self.items.values()) <= self.capacity
"""
QUESTIONS = """\
Question: A farmer has 17 sheep and buys 3 crates with 12 chickens each. How many animals does she have now?
Answer: Three crates with 12 chickens each make 36 chickens. Together with the 17 sheep that is 36 + 17 = 53 animals.

Question: Which gas do plants take from the air?
Answer: Plants take in carbon dioxide, and give off oxygen."""
SCIENCE = """\
Enzymes are proteins that speed up chemical reactions in living cells. Each of them binds only certain molecules, its \
substrates, at a place that is called the active site. Heat or acid can change the shape of an enzyme, which then no \
longer works; this is one reason why a high fever is dangerous, and why vinegar preserves vegetables."""
DIALOGUE = """\
"You said you'd be home by nine," she said.
"I know. The train stood outside of Leeds for an hour."
"And your phone?"
"Flat since lunch." He put the flowers on the table. "I'm sorry, Ana. Really."
She looked at them, then at him, and laughed. "Those are from the petrol station.\""""
VERSE = """\
The tide goes out and leaves the stones to shine,
The heron stands where yesterday was sea;
I count the boats along the harbour line
And none of them has brought you back to me.

The winter keeps its candle in the pane,
The road is white, the chimneys hold their breath;
What summer lent it will not lend again,
And love must make its bargains short of death.

Yet when the thaw has let the river sing,
And every ditch runs silver to the weir,
I shall forgive the year for being spring,
And spring forgive me that you are not here."""
NEWS = """\
The council voted on Tuesday to close the Mill Street bridge for eleven months while its deck is replaced. Buses 14 \
and 31 will be diverted by way of the ring road from 2 May. "Nobody likes a detour, but the alternative was a weight \
limit that would have kept fire engines out," said Ruth Adeyemi, who chairs the transport committee. Repairs are \
expected to cost 8.4 million pounds, of which the region pays 60 percent; shopkeepers have asked for lower rates."""
SHELL = """\
#!/bin/sh
# Back up the database every night and keep the last seven copies.
set -eu
folder=/var/backups/shop
mkdir -p "$folder"
pg_dump --format=custom shop > "$folder/shop-$(date +%F).dump"
find "$folder" -name 'shop-*.dump' -mtime +7 -delete
"""
FUNCTIONS = '''\
from typing import List


def longest_run(values: List[int]) -> int:
    """Return the length of the longest run of equal numbers.
    >>> longest_run([1, 1, 2, 2, 2, 3])
    3
    >>> longest_run([])
    0
    """
    best = count = 0
    previous = None
    for value in values:
        count = count + 1 if value == previous else 1
        best = max(best, count)
        previous = value
    return best


def mirrored(grid: List[List[str]]) -> List[List[str]]:
    """Swap left and right of each row, so that the first column becomes the last one."""
    return [[row[column] for column in range(len(row) - 1, -1, -1)] for row in grid]
'''
FRENCH = """\
Le marché ouvre à sept heures, mais les meilleurs fromages sont partis avant huit heures et demie. Ma grand-mère le \
savait bien : elle arrivait la première, goûtait tout, et ne payait jamais le prix écrit sur l'ardoise."""
PROMPTS = (PROSE, CODE, QUESTIONS, SCIENCE, DIALOGUE, VERSE, NEWS, SHELL, FUNCTIONS, FRENCH)
