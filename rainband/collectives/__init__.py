"""Collective operations as data: tables of moves, their programs, a checker and a cost model. No I/O."""
