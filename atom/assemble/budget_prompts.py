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
PROMPTS = (PROSE, CODE, QUESTIONS, SCIENCE, DIALOGUE)
