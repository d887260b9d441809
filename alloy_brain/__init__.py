"""The reference brain: it hears every agent, decides where work goes, and writes down why.

    agents --Attach--> server -> fleet (what is known) -> placement (pure) -> ledger (disk)
    clients --Place--> server                                    decision (the record)

Rules that stay true in here:

* Of the agent it knows the wire (`alloy_agent.proto`) and the nouns (`alloy_agent.model`) alone.
* The node has the last word: a decision is a wish until every node has granted it.
* Disk first: a reservation is in the ledger before any node hears of it.
* A placement is a pure function of what its record holds, so that the record can be replayed.
"""
