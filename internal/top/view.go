// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/rivo/tview"

	"github.com/tapverbs/tapverbs/provider"
)

// viewParts is how many parts the view asks for: the cells of a map on a large screen.
const viewParts = 512

// Look has a device tell about itself; Target.Ask is one.
type Look func(parts int) (*provider.Snapshot, error)

// view shows a device in a terminal. All fields are those of the application's goroutine.
type view struct {
	app               *tview.Application
	pages             *tview.Pages
	all               *tview.Flex
	head, place, foot *tview.TextView
	regions, qps      *tview.Table
	counters          *tview.Table
	panes             []tview.Primitive
	now, before       *provider.Snapshot
	chosen            uint32 // the region's key
	paused            atomic.Bool
	trouble           string // why what is shown is not new
	filling           bool   // the table of regions
	quit              context.CancelFunc
}

const keys = "q quit   Tab next pane   arrows choose   p pause   ? help"

const help = `tapverbs top

q, Ctrl-C   quit
Tab         next pane: regions, queue pairs, counters (Shift-Tab: back)
arrows      choose a region, of which the map is shown; scroll
p           pause, and go on
?           this, and away with it

Map: ` + "\n" + legend + `

A cell that has anything of a kind but absent shows
that: of several the one there is most of.

LEFT of a queue pair: retries, and retries after RNR
NAKs, that are left; 7 of the latter stands for any number.`

// View shows what look gives on a screen (nil: the terminal) at each tick, until the user
// or ctx ends it: nil; or until the process has ended: ErrEnded. The terminal is then as
// it was before.
func View(ctx context.Context, look Look, ticks <-chan time.Time, screen tcell.Screen) error {
	ctx, quit := context.WithCancel(ctx)
	defer quit()
	first, err := look(viewParts)
	if err != nil {
		return err
	}
	v := newView(quit)
	if screen != nil {
		v.app.SetScreen(screen)
	}
	v.show(first)

	// The only one that stops the application, so that it never waits for one that is no
	// more.
	ended := make(chan error, 1)
	go func() {
		v.app.QueueUpdate(func() {}) // it runs: Stop does nothing before
		err := v.follow(ctx, look, ticks)
		v.app.Stop()
		ended <- err
	}()
	err = v.app.Run()
	quit()
	if err != nil {
		return err // of the terminal
	}
	return <-ended
}

// follow looks at each tick until the process has ended.
func (v *view) follow(ctx context.Context, look Look, ticks <-chan time.Time) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticks:
		}
		if v.paused.Load() {
			continue
		}
		sn, err := look(viewParts)
		if errors.Is(err, ErrEnded) {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		v.app.QueueUpdateDraw(func() {
			switch {
			case v.paused.Load():
			case err != nil:
				v.trouble = clean(err.Error())
				v.status()
			default:
				v.trouble = ""
				v.show(sn)
			}
		})
	}
}

func newView(quit context.CancelFunc) *view {
	v := &view{app: tview.NewApplication(), quit: quit}
	text := func() *tview.TextView { return tview.NewTextView().SetWrap(false) }
	v.head, v.place, v.foot = text(), text(), text()
	v.head.SetTextStyle(tcell.StyleDefault.Bold(true))
	grid := func(title string) *tview.Table {
		t := tview.NewTable().SetFixed(1, 1).SetSelectable(true, false)
		t.SetSelectedStyle(tcell.StyleDefault.Reverse(true))
		t.SetBorder(true).SetTitleAlign(tview.AlignLeft).SetTitle(title)
		v.panes = append(v.panes, t)
		return t
	}
	v.regions, v.qps, v.counters = grid(" regions "), grid(" queue pairs "), grid(" counters ")
	v.place.SetBorder(true).SetTitleAlign(tview.AlignLeft)
	v.regions.SetSelectionChangedFunc(func(row, _ int) {
		if !v.filling && v.now != nil && row >= 1 && row <= len(v.now.Regions) {
			v.chosen = v.now.Regions[row-1].Key
			v.drawPlace()
		}
	})
	v.place.SetDrawFunc(func(_ tcell.Screen, x, y, w, h int) (int, int, int, int) {
		v.fitPlace(w-2, h-2)
		return x + 1, y + 1, w - 2, h - 2
	})
	v.all = tview.NewFlex().SetDirection(tview.FlexRow).
		AddItem(v.head, 2, 0, false).
		AddItem(v.regions, 0, 3, true).
		AddItem(v.place, 7, 0, false).
		AddItem(v.qps, 0, 3, false).
		AddItem(v.counters, 0, 2, false).
		AddItem(v.foot, 1, 0, false)
	box := tview.NewTextView().SetText(help)
	box.SetBorder(true).SetTitle(" help ")
	// In the middle, as large as the text, or the screen.
	middle := tview.NewGrid().SetColumns(0, 70, 0).SetRows(0, 22, 0).AddItem(box, 1, 1, 1, 1, 0, 0, true)
	v.pages = tview.NewPages().AddPage("all", v.all, true, true).AddPage("help", middle, true, false)
	v.app.SetRoot(v.pages, true).SetFocus(v.regions)
	v.app.SetInputCapture(v.key)
	v.status()
	return v
}

// key acts on keys that mean the same everywhere.
func (v *view) key(e *tcell.EventKey) *tcell.EventKey {
	front, _ := v.pages.GetFrontPage()
	switch {
	case e.Key() == tcell.KeyCtrlC, e.Rune() == 'q':
		v.quit()
	case front == "help":
		v.pages.HidePage("help")
		v.app.SetFocus(v.panes[0])
	case e.Rune() == '?':
		v.pages.ShowPage("help")
	case e.Rune() == 'p':
		v.paused.Store(!v.paused.Load())
		v.status()
	case e.Key() == tcell.KeyTab:
		v.next(1)
	case e.Key() == tcell.KeyBacktab:
		v.next(len(v.panes) - 1)
	default:
		return e
	}
	return nil
}

func (v *view) next(by int) {
	at := slices.Index(v.panes, v.app.GetFocus())
	v.app.SetFocus(v.panes[(max(at, 0)+by)%len(v.panes)])
}

// show shows a snapshot.
func (v *view) show(sn *provider.Snapshot) {
	v.before, v.now = v.now, sn
	head := header(sn)
	v.head.SetText(strings.Join(head, "\n"))
	v.all.ResizeItem(v.head, len(head), 0)
	v.filling = true
	fill(v.regions, regionTable(sn))
	at := slices.IndexFunc(sn.Regions, func(r provider.SnapshotRegion) bool { return r.Key == v.chosen })
	if at < 0 && len(sn.Regions) > 0 {
		at, v.chosen = 0, sn.Regions[0].Key
	}
	v.regions.Select(at+1, 0)
	v.filling = false
	fill(v.qps, qpTable(sn))
	fill(v.counters, counterTable(sn, v.before))
	v.regions.SetTitle(" " + of("regions", sn.NumRegions, len(sn.Regions)) + " ")
	v.qps.SetTitle(" " + of("queue pairs", sn.NumQPs, len(sn.QPs)) + " ")
	v.drawPlace()
	v.status()
}

// fill puts a table into a pane, in which what is selected stays so.
func fill(to *tview.Table, t table) {
	for n, row := range append([][]string{t.head}, t.rows...) {
		for i, s := range row {
			c := tview.NewTableCell(tview.Escape(s)).SetSelectable(n > 0)
			if !t.left[i] {
				c.SetAlign(tview.AlignRight)
			}
			if n == 0 {
				c.SetAttributes(tcell.AttrBold)
			}
			to.SetCell(n, i, c)
		}
	}
	for to.GetRowCount() > len(t.rows)+1 {
		to.RemoveRow(to.GetRowCount() - 1)
	}
	if row, _ := to.GetSelection(); row < 1 || row > len(t.rows) {
		to.Select(min(max(row, 1), len(t.rows)), 0)
	}
}

// region is the one that is chosen.
func (v *view) region() *provider.SnapshotRegion {
	if v.now != nil {
		for i := range v.now.Regions {
			if v.now.Regions[i].Key == v.chosen {
				return &v.now.Regions[i]
			}
		}
	}
	return nil
}

// drawPlace titles the map; fitPlace draws it.
func (v *view) drawPlace() {
	title := " map: " + legend + " "
	if r := v.region(); r != nil {
		title = fmt.Sprintf(" %08x: %s ", r.Key, legend)
	}
	v.place.SetTitle(title)
}

// fitPlace draws the map of the chosen region as large as there is room: what became of
// its pages takes two lines.
func (v *view) fitPlace(width, height int) {
	r := v.region()
	if r == nil || width <= 0 {
		v.place.SetText("")
		return
	}
	cells := []rune(draw(r.Map, width*max(height-2, 1), r.Suspended))
	var lines []string
	for len(cells) > 0 {
		n := min(width, len(cells))
		lines = append(lines, string(cells[:n]))
		cells = cells[n:]
	}
	if len(lines) == 0 {
		lines = append(lines, "(not a range of memory)")
	}
	v.place.SetText(strings.Join(append(lines, events(r.Usage)...), "\n"))
}

// status is the last line.
func (v *view) status() {
	switch {
	case v.trouble != "":
		v.foot.SetText(v.trouble + "   " + keys)
	case v.paused.Load():
		v.foot.SetText("PAUSED   " + keys)
	default:
		v.foot.SetText(keys)
	}
}
