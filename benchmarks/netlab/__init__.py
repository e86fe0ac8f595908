"""The network laboratory: sites as network namespaces, links with real `tc netem`.

Links are changed, cut and healed while a run goes on.

For its users:

    laboratory              `with Laboratory(["server", "client"], profile="dsl") as lab: ...`
    profiles                pure: what a link does, and the named profiles

Private to it:

    netem, plan             pure: the arguments of `tc` for a link, the wiring
    backend                 chooses what carries packets, where the kernel has sch_netem or not
    veth                    pairs of veth with netem on both ends
    machine, image          one small router VM (QEMU, TCG) whose kernel has netem
    host                    runs `ip` and `tc`, ends processes, says what is missing
    records                 what is kept on disk about a laboratory, so that another process finds
                            it, or what a crash left of it
    probe                   what is measured inside a site; standard library only

docs/netlab.md says how it is used and what of it is real.
"""
