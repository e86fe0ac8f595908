"""The network laboratory: sites as network namespaces, links with real `tc netem`, cut and healed while a run goes on.

    profiles, netem, plan     pure: what a link does, the words that `tc` takes for it, who is wired to whom
    host                      runs `ip` and `tc`, starts and ends processes, says what is missing
    veth                      backend where the kernel has sch_netem: pairs of veth with netem on both ends
    machine, image            backend where it has not: one small router VM (QEMU, TCG) whose kernel has it
    records                   what is kept on disk about a laboratory, so that another process finds it, or what a crash left of it
    laboratory                the interface: `with Laboratory(["server", "client"], profile="dsl") as lab: ...`
    probe                     what is measured inside a site; standard library only

docs/netlab.md says how it is used and what of it is real.
"""
