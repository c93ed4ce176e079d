"""Simulate: the steps of all ranks of a large job, recorded from the real engine, matched and replayed on a network.

engine      one rank's real model, zeroify and step, against stand-ins; on the meta device, or with small data
standins    everything beyond one rank
recorder    what one rank did in a step, and its work
programs    what each rank does, lane by lane; every call meets the same call of all its ranks
replay      events in time: processors, links, queues
"""
