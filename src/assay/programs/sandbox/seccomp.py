"""The system call filter of the sandbox, as a classic BPF program.

It complements the isolation and does not replace it: it denies what neither namespaces nor Landlock cover, such as
sockets of every kind, memory outside of the process (memfd, System V segments), new namespaces, and leaving the process
group, by which the parent counts and kills the processes.
"""

import platform
import struct

__all__ = ["filter_program"]

_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each, low half first
_X32 = 0x40000000  # numbers of the x32 interface, which would evade the table
_CLONE_NEW = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64), from the kernel's tables arch/x86/entry/syscalls/syscall_64.tbl and asm-generic/unistd.h
_DENIED = {
    **{"socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272)},
    **{"pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429)},
    **{"fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433)},
    **{"mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265)},
    **{"fanotify_init": (300, 262), "quotactl": (179, 60), "acct": (163, 89), "swapon": (167, 224)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104), "reboot": (169, 142)},
}
# Landlock leaves these open, and a process of the same user may apply them to files and processes outside.
_DENIED_TO_SAME_USER = {
    **{"chmod": (90, None), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None)},
    **{"lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None)},
    **{"futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    **{"sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274)},
}
_SIGNALS = {
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424)},
}
_WITHOUT_EFFECT = {"setsid": (112, 157), "setpgid": (109, 154)}  # they succeed, so that ordinary programs run
_CLONE, _CLONE3, _SOCKETPAIR, _PRLIMIT = (56, 220), (435, 435), (53, 199), (302, 261)


def filter_program(*, same_user: bool = False, deny_signals: bool = False) -> bytes | None:
    """Array of `struct sock_filter`, or None on an architecture without a table.

    Args:
        same_user: the process runs as the user of the parent and sees the parent's files and processes.
        deny_signals: no process can be signalled, not even an own child. For kernels whose Landlock does not cover it.
    """
    machine = platform.machine()
    if machine not in _ARCHES:
        return None
    column = 0 if machine == "x86_64" else 1
    denied = _DENIED | (_DENIED_TO_SAME_USER if same_user else {}) | (_SIGNALS if deny_signals else {})
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for numbers in denied.values():
        if (number := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for numbers in _WITHOUT_EFFECT.values():
        lines += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ERRNO)]
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # libc falls back to clone
    lines += [
        (_EQUAL, 0, 4, _CLONE[column]),  # flags are in memory for clone3, in the first argument for clone
        (_LOAD, 0, 0, _ARGUMENTS),
        (_ANY_BIT, 0, 1, _CLONE_NEW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, _PRLIMIT[column]),  # only of the process itself
        (_LOAD, 0, 0, _ARGUMENTS),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 5, _SOCKETPAIR[column]),  # only connected streams: a datagram socket could name another address
        (_LOAD, 0, 0, _ARGUMENTS + 8),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 0, 1, 1),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in lines)
