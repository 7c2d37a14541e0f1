"""Loading: chunk-caches come from disk or a remote store while the prompt is already being computed.

    balance  the sums: eq. 16 of Cache-Craft, and where compute and load meet soonest
    speeds   how fast both are, measured all the time and never configured
    tail     what is still to come, shared by the threads that read from the back and the pass that takes from the front
    cake     the two ends of Cake (Jin et al., 2024), and layer-wise preloading as its special case

The order in which things come: whole runs from the prompt's end, while the front computes pieces; then, for the last
pass, what is left layer by layer.
"""
