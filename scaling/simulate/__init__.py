"""Simulate: the steps of all ranks of a large job, recorded from the real engine, matched and replayed on a network.

Owns: stand-ins for everything beyond one rank, what a rank did in a step, whether the ranks' steps fit together, and
how long they take on links that are only described. Must not know: how the engine decides what to do.

    engine      one rank's real model, zeroify and step, against stand-ins; on the meta device, or with small data
    programs    what each rank does, lane by lane
    matching    every call meets the same call of all its ranks, every message a receive
    replay      events in time: processors, links, queues
"""
