"""Secure sums: the parameter server learns the sum of the sites' deltas, and none of them.

    lattice.py    values become whole numbers of a public step, and ring words packed into frames
    shamir.py     shares of a secret, of which a majority gives it back
    masks.py      keys, sealed shares, and the masks of a chunk; needs the extra `secure`
    site.py       what a site answers: a pure machine with the rules that protect it
    masking.py    a site's deltas, coded once under the masks of one attempt
    opening.py    the sum at the parameter server, from masked frames and the answers

After Bonawitz et al., CCS 2017 (eprint 2017/281), over a ring of neighbours as in Bell et al., CCS
2020 (eprint 2020/704). The set of sites is `fsl_async.roles.sync.roster`, the parameter server's
decisions `fsl_async.roles.sync.secure`. Reasons: docs/adr/0174.
"""
