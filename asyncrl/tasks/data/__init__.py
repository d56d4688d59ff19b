"""Users' files of problems to items: which files, which columns, which layout, what is left out.

files reads rows, columns finds values in them, layouts says what a row means, load makes the items of one source.
Knows no tokenizer and no prompt.
"""
