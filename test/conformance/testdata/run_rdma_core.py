# SPDX-License-Identifier: Apache-2.0
"""Runs rdma-core's Python tests as they are: run_rdma_core.py DIR DEVICE GID [NAME...]

DIR holds the tests as Debian ships them, unpacked. The device and the GID index are
told to them by the options that they have for it. One line is printed for each test:
its name, ok, skipped, failed or error, and the reason, separated by tabs.

The tests of the RDMA CM fork two processes that share a device, and an address. Here a
process has a device for itself. NODES in the environment names a directory with what two
other ranks had in theirs, in rank1 and rank2: the processes are started anew as one each,
and where the tests name the one address they get the process's own, or the server's.
"""
import enum
import multiprocessing
import os
import sys
import unittest
from importlib.machinery import SourceFileLoader

if __name__ == '__main__':
    os.environ['RUN'] = '\t'.join(sys.argv[1:])  # processes that are started anew are told by it
where, dev, gid, *names = os.environ['RUN'].split('\t')
sys.path.insert(0, where)
sys.argv = ['run_tests.py', '--dev', dev, '--gid', gid]

from args_parser import parser  # noqa: E402  (theirs)

tests = SourceFileLoader('tests', os.path.join(where, '__init__.py')).load_module()
parser.parse_args()


def node(rank):
    """The environment of a rank."""
    with open(os.path.join(os.environ['NODES'], f'rank{rank}')) as f:
        return dict(line.rstrip('\n').split('=', 1) for line in f)


class Node(multiprocessing.get_context('spawn').Process):
    """A process that is a rank of its own: the passive side is rank 1."""
    def start(self):
        old = dict(os.environ)
        passive = self._kwargs['passive']
        self._kwargs = {k: int(v) if isinstance(v, enum.IntEnum) else v for k, v in self._kwargs.items()}
        os.environ.update(node(1 if passive else 2), SHARED=old['TAPVERBS_ADDR'])
        try:
            super().start()
        finally:
            os.environ.clear()
            os.environ.update(old)


class Context:
    """What the tests ask multiprocessing for."""
    spawn = multiprocessing.get_context('spawn')
    Barrier, Queue, Process = spawn.Barrier, spawn.Queue, Node


if 'NODES' in os.environ:
    from tests import base, base_rdmacm, rdmacm_utils

    base.mp.get_context = lambda method: Context if method == 'fork' else Context.spawn
    # The addresses are the device's, not its netdev's.
    base.RDMATestCase.get_ip_mac_address = staticmethod(lambda netdev: (os.environ['TAPVERBS_ADDR'], None))
    base.RDMATestCase.__getstate__ = lambda self: {k: v for k, v in vars(self).items() if k in (
        '_testMethodName', 'ip_addr', 'dev_name', 'ib_port', 'gid_index', 'syncer', 'notifier')}
    theirs = base_rdmacm.AddrInfo

    def addr_info(src=None, dst=None, **more):
        shared = os.environ['SHARED']
        return theirs(src=os.environ['TAPVERBS_ADDR'] if src == shared else src,
                      dst=node(1)['TAPVERBS_ADDR'] if dst == shared else dst, **more)

    base_rdmacm.AddrInfo = rdmacm_utils.AddrInfo = addr_info


class Result(unittest.TestResult):
    def say(self, test, status, why=''):
        print(test.id(), status, ' '.join(str(why).split()), sep='\t', flush=True)

    def addSuccess(self, test):
        self.say(test, 'ok')

    def addSkip(self, test, why):
        self.say(test, 'skipped', why)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.say(test, 'failed', repr(err[1]))
        sys.stderr.write(self.failures[-1][1])

    def addError(self, test, err):
        super().addError(test, err)
        self.say(test, 'error', repr(err[1]))
        sys.stderr.write(self.errors[-1][1])


if __name__ == '__main__':
    load = unittest.defaultTestLoader
    suite = load.loadTestsFromNames(names, tests) if names else load.loadTestsFromModule(tests)
    suite.run(Result())
