# SPDX-License-Identifier: Apache-2.0
#
#   make libs     libibverbs.so.1, its engine, librdmacm.so.1 and libtapverbs.so.1, into bin/lib
#   make install-libs PREFIX=DIR    the same, into DIR/lib, with the header, the
#                 pkg-config file and the man pages of libtapverbs
#   make run      build, then run the demo: two processes, real data, a table
#   make test     install what the tests need, then run all tests
#   make lint     formatting, vet, staticcheck, the import table
#   make race     all tests under the race detector
#   make fuzz     each fuzz target with FUZZCOUNT inputs (200000)
#   make bench    tapverbs, the raw device, TCP and what others make of it, side by side:
#                 tables and plots for test/bench/README.md, raw data in test/bench/data;
#                 with -only: tables on the terminal, plots and raw data in bin.
#                 BENCHFLAGS='-only raw,tcp -rounds 3'; LAB=program for another virtual machine
#   make bench-deps  install what that compares with, from Debian's packages
#   make bench-memory  what regions cost that are not pinned: tables, and plots
#   make interop  the kernel's soft-RoCE as peer, in a virtual machine: a line for each case;
#                 INTEROP=all for those that take long too, INTEROP=short for one of each kind.
#                 See test/interop/README.md
#   make lab      bin/lab: that virtual machine as a program
#   make ci       what CI runs

GO         ?= go
FUZZCOUNT  ?= 200000
# How long a package's tests may take, on a machine that has more to do: a hang is longer.
HANG       ?= 30m
RUNFLAGS   ?=
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

# A C compiler is needed: the pager thread of package mr is written in C.
export CGO_ENABLED = 1

.PHONY: all build libs install-libs run test deps lint race fuzz interop lab bench bench-deps bench-memory ci clean

all: build

build:
	@mkdir -p bin
	$(GO) build -o bin/ ./cmd/...

# The C library is plain C; the engine that it loads is Go. See shim/README.md.
LIBDIR ?= bin/lib
SHIM_CFLAGS = -std=gnu11 -O2 -g -fPIC -Wall -Wextra -Werror
SHIM_LDFLAGS = -shared -Wl,--version-script=shim/verbs/libibverbs.map -Wl,-soname,libibverbs.so.1 \
	-Wl,-z,defs -Wl,-Bsymbolic-functions

$(LIBDIR)/libibverbs.so.1: $(wildcard shim/verbs/*)
	@mkdir -p $(LIBDIR)
	$(CC) $(SHIM_CFLAGS) $(CFLAGS) $(SHIM_LDFLAGS) -o $@ shim/verbs/*.c -lpthread -ldl

# What there is beyond verbs.h: it asks libibverbs.so.1 for all of it.
$(LIBDIR)/libtapverbs.so.1: $(wildcard shim/dv/* shim/dv/infiniband/*) shim/verbs/dv.h shim/verbs/engine.h
	@mkdir -p $(LIBDIR)
	$(CC) $(SHIM_CFLAGS) $(CFLAGS) -shared -Wl,--version-script=shim/dv/libtapverbs.map -Wl,-soname,libtapverbs.so.1 \
		-Wl,-z,defs -o $@ shim/dv/*.c

# RDMA CM and rsockets, on libibverbs.so.1 and its engine.
$(LIBDIR)/librdmacm.so.1: $(wildcard shim/rdmacm/*) shim/verbs/dv.h shim/verbs/engine.h $(LIBDIR)/libibverbs.so.1
	$(CC) $(SHIM_CFLAGS) $(CFLAGS) -shared -Wl,--version-script=shim/rdmacm/librdmacm.map -Wl,-soname,librdmacm.so.1 \
		-Wl,-z,defs -Wl,-Bsymbolic-functions -o $@ shim/rdmacm/*.c $(LIBDIR)/libibverbs.so.1 -lpthread

# Go's runtime preempts by signal who computes for 10 ms. A program's thread may have left the
# engine when that comes, and is in its own poll(2), which signals end: cooperation only. It stands
# in place of what the go command would set for a go.mod of an older Go than the toolchain's.
GODEBUG_ENGINE = -X runtime.godebugDefault=asyncpreemptoff=1

# The go command compiles the C code of all packages again for a c-shared library, each time
# that it is asked to.
ENGINE_SOURCES = Makefile go.mod go.sum shim/engine/engine.map $(wildcard shim/verbs/*.h) \
	$(shell find wire tap mr qp cm provider shim/engine internal -name '*.go' -o -name '*.[chS]')

$(LIBDIR)/libtapverbs-engine.so: $(ENGINE_SOURCES)
	@mkdir -p $(LIBDIR)
	$(GO) build -buildmode=c-shared -ldflags '$(GODEBUG_ENGINE) -extldflags "-Wl,--version-script=$(CURDIR)/shim/engine/engine.map"' \
		-o $@ ./shim/engine
	@rm -f $(LIBDIR)/libtapverbs-engine.h

libs: $(addprefix $(LIBDIR)/,libibverbs.so.1 librdmacm.so.1 libtapverbs.so.1 libtapverbs-engine.so)
	@ln -sf libibverbs.so.1 $(LIBDIR)/libibverbs.so
	@ln -sf libtapverbs.so.1 $(LIBDIR)/libtapverbs.so
	@ln -sf librdmacm.so.1 $(LIBDIR)/librdmacm.so

install-libs: libs
	@test -n "$(PREFIX)" || { echo "say where: make install-libs PREFIX=/opt/tapverbs"; exit 1; }
	install -d $(addprefix $(DESTDIR)$(PREFIX)/,lib/pkgconfig include/infiniband share/man/man3 share/man/man7)
	install -m 755 $(addprefix $(LIBDIR)/,libibverbs.so.1 librdmacm.so.1 libtapverbs.so.1 libtapverbs-engine.so) $(DESTDIR)$(PREFIX)/lib/
	ln -sf libibverbs.so.1 $(DESTDIR)$(PREFIX)/lib/libibverbs.so
	ln -sf libtapverbs.so.1 $(DESTDIR)$(PREFIX)/lib/libtapverbs.so
	ln -sf librdmacm.so.1 $(DESTDIR)$(PREFIX)/lib/librdmacm.so
	install -m 644 shim/dv/infiniband/tapverbs_dv.h $(DESTDIR)$(PREFIX)/include/infiniband/
	sed 's|@PREFIX@|$(PREFIX)|' shim/dv/libtapverbs.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/libtapverbs.pc
	install -m 644 docs/man/*.3 $(DESTDIR)$(PREFIX)/share/man/man3/
	install -m 644 docs/man/*.7 $(DESTDIR)$(PREFIX)/share/man/man7/

run: build
	@bin/pingpong $(RUNFLAGS)

deps:
	@.ci/deps

test: deps
	$(GO) test -timeout $(HANG) ./...

lint:
	@bad=$$(gofmt -l $$(git ls-files '*.go')); if [ -n "$$bad" ]; then echo "not gofmt-clean:"; echo "$$bad"; exit 1; fi
	$(GO) mod tidy -diff
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	$(GO) test ./internal/lint

# The programs of test/conformance run without the race detector, with it or not.
race:
	$(GO) test -race -timeout $(HANG) $$($(GO) list ./... | grep -v /test/conformance)

fuzz:
	@.ci/fuzz $(FUZZCOUNT)

lab:
	@mkdir -p bin
	$(GO) build -o bin/lab ./test/interop/lab/ctl

# INTEROP=all or short, KERNEL=6.12 instead of bookworm's 6.1, RUN='TestPerftest/ib_send.*' for some.
interop:
	@KERNEL='$(KERNEL)' RUN='$(RUN)' .ci/interop $(INTEROP)

# Only a run of all parts goes into the repository.
BENCHFLAGS ?=
BENCHFILES = $(if $(findstring -only,$(BENCHFLAGS)),-json bin/bench.json -plots bin/plots,\
	-json test/bench/data/bench.json -readme test/bench/README.md -plots test/bench/plots)
bench: build libs lab
	$(GO) build -o bin/bench ./test/bench
	@$(if $(LAB),true,bin/lab fetch -k 6.12 || true) # or the tables say that it is not there
	bin/bench $(BENCHFILES) $(if $(LAB),-lab $(LAB)) $(BENCHFLAGS)

bench-deps:
	@.ci/deps bench

bench-memory:
	$(GO) run ./test/bench memory

ci:
	bash .ci/run

clean:
	rm -rf bin
