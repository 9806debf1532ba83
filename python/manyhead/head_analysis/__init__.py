"""What the heads of an attention layer do, one by one: `manyhead heads`.

`statistics` measures saved Q, K and V tile by tile, so that the matrix of weights never exists as a whole; `removal`
says what each head adds to its layer's output; `recording` reads files, `demo_model` runs the sentence encoder of
`encoder`; `pictures` and `page` show the `report`.
"""
