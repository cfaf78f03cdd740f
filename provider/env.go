// SPDX-License-Identifier: Apache-2.0

package provider

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/tapverbs/tapverbs/tap"
)

// Variables of the environment that say what device a program has. shim/README.md
// describes them.
const (
	EnvPort    = "TAPVERBS_PORT"
	EnvAddr    = "TAPVERBS_ADDR"
	EnvAddr6   = "TAPVERBS_ADDR6"
	EnvMAC     = "TAPVERBS_MAC"
	EnvGateway = "TAPVERBS_GATEWAY"
	EnvSysfs   = "TAPVERBS_SYSFS"
	EnvBudget  = "TAPVERBS_BUDGET"
	EnvStore   = "TAPVERBS_STORE"
	EnvMonitor = "TAPVERBS_MONITOR"
	EnvFrames  = "TAPVERBS_FRAMES"
	EnvECN     = "TAPVERBS_ECN"
	EnvQueues  = "TAPVERBS_QUEUES"
)

// ConfigFromEnv reads a Config from variables; get gives the value of one, "" if it
// is not set. Errors are ErrInvalid and name the variable.
func ConfigFromEnv(get func(name string) string) (cfg Config, err error) {
	cfg.Port, cfg.Sysfs, cfg.Store = get(EnvPort), get(EnvSysfs), get(EnvStore)
	if s := get(EnvBudget); s != "" {
		if cfg.Budget, err = ParseBytes(s); err != nil {
			return cfg, fmt.Errorf("%s: %w", EnvBudget, err)
		}
	}
	for _, name := range [...]string{EnvAddr, EnvAddr6} {
		for s := range list(get(name)) {
			p, err := parsePrefix(s)
			if err != nil {
				return cfg, fmt.Errorf("%s: %q is not an address, such as 10.91.0.1/24: %w", name, s, ErrInvalid)
			}
			cfg.Addrs = append(cfg.Addrs, p)
		}
	}
	for s := range list(get(EnvGateway)) {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return cfg, fmt.Errorf("%s: %q is not an IP address: %w", EnvGateway, s, ErrInvalid)
		}
		cfg.Gateway = append(cfg.Gateway, a)
	}
	if cfg.Monitor, err = MonitorFromEnv(get); err != nil {
		return cfg, err
	}
	if err = cfg.SetFrames(get(EnvFrames)); err != nil {
		return cfg, fmt.Errorf("%s: %w", EnvFrames, err)
	}
	switch s := get(EnvECN); s {
	case "", "on":
	case "off":
		cfg.NoECN = true
	default:
		return cfg, fmt.Errorf("%s: %q is neither on nor off: %w", EnvECN, s, ErrInvalid)
	}
	if s := get(EnvQueues); s != "" {
		if cfg.Queues, err = strconv.Atoi(s); err != nil || cfg.Queues < 1 {
			return cfg, fmt.Errorf("%s: %q is not a number of queues: %w", EnvQueues, s, ErrInvalid)
		}
	}
	if s := get(EnvMAC); s != "" {
		if cfg.MAC, err = net.ParseMAC(s); err != nil {
			return cfg, fmt.Errorf("%s: %q is not a MAC: %w", EnvMAC, s, ErrInvalid)
		}
	}
	return cfg, nil
}

// SetFrames says what frames there are to be on Port: "super", as large as the kernel has
// them, which is so if nothing is set; "single", of one packet each; "plain", without a vnet
// header too. Others are ErrInvalid.
func (c *Config) SetFrames(s string) error {
	switch s {
	case "", "super":
		c.Plain, c.Without = false, 0
	case "single":
		c.Plain, c.Without = false, tap.USO4|tap.USO6
	case "plain":
		c.Plain, c.Without = true, 0
	default:
		return fmt.Errorf("frames %q are none of super, single and plain: %w", s, ErrInvalid)
	}
	return nil
}

// MonitorFromEnv is Config.Monitor as EnvMonitor says it: MonitorAuto for nothing or "on",
// "" for "off", or a directory.
func MonitorFromEnv(get func(name string) string) (string, error) {
	switch s := get(EnvMonitor); {
	case s == "" || s == "on":
		return MonitorAuto, nil
	case s == "off":
		return "", nil
	case filepath.IsAbs(s):
		return s, nil
	default:
		return "", fmt.Errorf("%s: %q is neither on, off nor a directory from the root on: %w", EnvMonitor, s, ErrInvalid)
	}
}

// list yields the parts of s between commas that are not empty.
func list(s string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for part := range strings.SplitSeq(s, ",") {
			if part = strings.TrimSpace(part); part != "" && !yield(part) {
				return
			}
		}
	}
}

// parsePrefix reads an address; its network has 24 bits, 64 with IPv6, when nothing
// is said.
func parsePrefix(s string) (netip.Prefix, error) {
	if strings.Contains(s, "/") {
		return netip.ParsePrefix(s)
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, err
	}
	bits := 64
	if a.Is4() {
		bits = 24
	}
	return netip.PrefixFrom(a, bits), nil
}
