package serve

import (
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
)

// disk is a collector of the space in the file system of a directory.
type disk struct {
	dir        string
	free, size *prometheus.Desc
}

func newDisk(dir string) disk {
	return disk{
		dir,
		prometheus.NewDesc("kvcast_journal_directory_free_bytes", "Bytes that are free for kvcast in the file system of the journal's directory.", nil, nil),
		prometheus.NewDesc("kvcast_journal_directory_size_bytes", "Size of the file system of the journal's directory.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (d disk) Describe(c chan<- *prometheus.Desc) {
	c <- d.free
	c <- d.size
}

// Collect implements prometheus.Collector.
func (d disk) Collect(c chan<- prometheus.Metric) {
	var s syscall.Statfs_t
	if syscall.Statfs(d.dir, &s) != nil {
		return // the journal reports what is wrong with its directory
	}
	block := float64(s.Bsize)
	c <- prometheus.MustNewConstMetric(d.free, prometheus.GaugeValue, block*float64(s.Bavail))
	c <- prometheus.MustNewConstMetric(d.size, prometheus.GaugeValue, block*float64(s.Blocks))
}
