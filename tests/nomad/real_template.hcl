# For tests on a real cluster: by default runners are processes of their node, so nothing is confined.
# Comes back quickly, so that restarts and moves can be watched.
job "template-0" {
  datacenters = ["*", "dc1"]
  type        = "batch"

  group "default-group" {
    restart {
      attempts = 3
      delay    = "0s"
      interval = "1h"
      mode     = "fail"
    }

    reschedule {
      attempts       = 3
      delay          = "5s"
      delay_function = "constant"
      interval       = "6h"
      unlimited      = false
    }

    ephemeral_disk {
      size = 10
    }

    task "default-task" {
      driver       = "raw_exec"
      kill_timeout = "0s"
      kill_signal  = "SIGKILL"

      config {
        command = "sleep"
        args    = ["infinity"]
      }

      logs {
        max_files     = 1
        max_file_size = 1
      }

      resources {
        cpu    = 20
        memory = 16
      }
    }
  }
}
