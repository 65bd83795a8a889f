"""Elastic runs over a network with faults, on a virtual clock: what the tests of the elastic protocol are run on."""
